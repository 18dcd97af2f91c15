/* SPDX-License-Identifier: Apache-2.0
 * empty.c - libraries torch_npu names and takes no symbol from. */
extern const char fmoe_sim_empty[];
const char fmoe_sim_empty[] = "fusedmoe Ascend simulator";
