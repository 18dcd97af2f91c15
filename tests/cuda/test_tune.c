/* SPDX-License-Identifier: Apache-2.0
 * test_tune.c - the path and tile choice of the CUDA backend, without a GPU. */
#include <stdio.h>
#include <string.h>

#include "fusedmoe.h"
#include "tune.h"

static int passed, failed;
#define CHECK(x) ((x) ? (void)passed++ : (void)(failed++, printf("FAILED line %d: %s\n", __LINE__, #x)))

int main(void)
{
    fmoe_cuda_shape s = {.H = 2048, .I = 768, .E = 128, .k = 8, .dtype = FMOE_BF16, .gated = 1, .cc = 90, .sms = 132};
    const char *why = NULL;
    CHECK(fmoe_cuda_choose_path(&s, &why) == FMOE_PATH_SM90 && why);
    s.dtype = FMOE_F16;
    CHECK(fmoe_cuda_choose_path(&s, &why) == FMOE_PATH_SM90);
    s.dtype = FMOE_F32;
    CHECK(fmoe_cuda_choose_path(&s, &why) == FMOE_PATH_SM80 && strstr(why, "f32"));
    s.dtype = FMOE_BF16;
    s.H = 2050;
    CHECK(fmoe_cuda_choose_path(&s, &why) == FMOE_PATH_SM80 && strstr(why, "H"));
    s.H = 2048;
    s.I = 770;
    CHECK(fmoe_cuda_choose_path(&s, &why) == FMOE_PATH_SM80 && strstr(why, "I"));
    s.I = 768;
    s.cc = 80;
    CHECK(fmoe_cuda_choose_path(&s, &why) == FMOE_PATH_SM80 && strstr(why, "9.0"));
    s.cc = 100;
    CHECK(fmoe_cuda_choose_path(&s, &why) == FMOE_PATH_SM80);
    s.cc = 90;
    s.general = 1;
    CHECK(fmoe_cuda_choose_path(&s, &why) == FMOE_PATH_SM80 && strstr(why, "FMOE_CUDA_PATH"));
    s.general = 0;

    /* Stages by what a block may have: 9.0 and 10.0, 8.0, 8.6 and 8.9 and 12.0, 7.5. */
    CHECK(fmoe_cuda_stages(232448) == 4 && fmoe_cuda_stages(166912) == 3 && fmoe_cuda_stages(101376) == 2);
    CHECK(fmoe_cuda_stages(65536) == 0 && fmoe_cuda_stages(0) == 0);

    /* Rows: every expert that can have rows may need align - 1 more. */
    CHECK(fmoe_cuda_rows(0, 128, 16) == 0);
    CHECK(fmoe_cuda_rows(1, 128, 16) == 16);
    CHECK(fmoe_cuda_rows(131072, 128, 16) == 131072 + 128 * 15);
    CHECK(fmoe_cuda_rows(10, 3, 1) == 10);
    for (int64_t R = 0; R < 300; R += 7)
        for (int64_t E = 1; E < 40; E += 3) {
            /* The worst case: all experts but one have one row. */
            const int64_t used = R < E ? R : E, worst = used ? 16 * (used - 1) + (R - used + 1 + 15) / 16 * 16 : 0;
            CHECK(fmoe_cuda_rows(R, E, 16) >= worst && fmoe_cuda_rows(R, E, 16) % 16 == 0);
            const int64_t tiles = used ? (used - 1) + (R - used + 1 + 63) / 64 : 0;
            CHECK(fmoe_cuda_tiles(R, E, 64) >= tiles);
        }

    CHECK(fmoe_cuda_dh_tile(768) == 192 && fmoe_cuda_dh_tile(1536) == 192);
    CHECK(fmoe_cuda_dh_tile(1024) == 128 && fmoe_cuda_dh_tile(128) == 128);
    s.cc = 90;
    CHECK(fmoe_cuda_use_decode(&s, 1) && fmoe_cuda_use_decode(&s, 16) && !fmoe_cuda_use_decode(&s, 17) &&
          !fmoe_cuda_use_decode(&s, 0));
    CHECK(fmoe_cuda_use_decode_coded(&s, 1) && fmoe_cuda_use_decode_coded(&s, 64) &&
          !fmoe_cuda_use_decode_coded(&s, 65) && !fmoe_cuda_use_decode_coded(&s, 0));
    s.general = 1; /* where products do not decode codes themselves */
    CHECK(fmoe_cuda_use_decode_coded(&s, 128) && !fmoe_cuda_use_decode_coded(&s, 129));
    s.general = 0;
    CHECK(fmoe_cuda_use_decode_precise(0, 2) && !fmoe_cuda_use_decode_precise(0, 3) &&
          fmoe_cuda_use_decode_precise(1, 64));
    s.I = 700;
    CHECK(!fmoe_cuda_use_decode(&s, 1) && !fmoe_cuda_use_decode_coded(&s, 1));
    s.I = 1408;
    CHECK(fmoe_cuda_use_decode(&s, 1));
    s.I = 768;
    CHECK(fmoe_cuda_use_decode_nmajor(&s, 8) && !fmoe_cuda_use_decode_nmajor(&s, 16) &&
          !fmoe_cuda_use_decode_nmajor(&s, 0));
    const int64_t most = fmoe_cuda_most_decode_nmajor(&s);
    CHECK(most >= 8 && most < 16 && fmoe_cuda_use_decode_nmajor(&s, most) &&
          !fmoe_cuda_use_decode_nmajor(&s, most + 1));
    s.I = 8200;
    CHECK(fmoe_cuda_use_decode_nmajor(&s, 1) && !fmoe_cuda_use_decode_nmajor(&s, 2));
    s.I = 768;
    s.gated = 0; /* weights [out,in] only */
    CHECK(fmoe_cuda_use_decode(&s, 1) && fmoe_cuda_use_decode(&s, 16) && !fmoe_cuda_use_decode_nmajor(&s, 1) &&
          fmoe_cuda_most_decode_nmajor(&s) == 0);
    s.gated = 1;
    CHECK(fmoe_cuda_decode_rank(0) && fmoe_cuda_decode_rank(8) && fmoe_cuda_decode_rank(128) &&
          !fmoe_cuda_decode_rank(136) && !fmoe_cuda_decode_rank(12));
    s.E = 8, s.k = 2;
    CHECK(fmoe_cuda_use_decode(&s, 4) && !fmoe_cuda_use_decode(&s, 5));
    for (int groups = 1; groups < 2000;
         groups += 61) /* none of the blocks is left without columns, and their results fit */
        for (int results = 4; results <= 4096; results *= 2) {
            const int blocks = fmoe_cuda_decode_blocks(groups, 264, results), each = (groups + blocks - 1) / blocks;
            CHECK(blocks >= 1 && blocks <= groups &&
                  (blocks == groups || (blocks % 264 == 0 && each * results <= 2048)));
        }
    CHECK(fmoe_cuda_decode_blocks(512, 264, 16) == 264 && fmoe_cuda_decode_blocks(1792, 264, 4 * 320) == 1792);
    CHECK(fmoe_cuda_use_tokens(4096 * 8, 128) && !fmoe_cuda_use_tokens(8192 * 8, 128));
    CHECK(fmoe_cuda_use_pairs(512 * 4, 32) && !fmoe_cuda_use_pairs(2048 * 4, 32) && fmoe_cuda_use_pairs(8192 * 4, 32));
    for (int64_t R = 1; R < 10000000; R = R * 3 + 1) {
        const int chunk = fmoe_cuda_sort_chunk(R);
        CHECK(chunk % 256 == 0 && (R + chunk - 1) / chunk <= (R <= 512 * 1024 ? 128 : 512));
    }
    printf("%d passed, %d failed, 0 skipped\n", passed, failed);
    return failed != 0;
}
