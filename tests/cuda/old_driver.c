/* SPDX-License-Identifier: Apache-2.0
 * old_driver.c - as much of libcuda.so.1 as the CUDA runtime asks before it sees that this driver, of CUDA 11.4, is too
 * old. */
int cuInit(unsigned flags);
int cuDriverGetVersion(int *version);

int cuInit(unsigned flags) { return (int)flags; }

int cuDriverGetVersion(int *version)
{
    *version = 11040;
    return 0;
}
