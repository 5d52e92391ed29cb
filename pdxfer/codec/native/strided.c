/* Copy between two strided arrays of equal shape: what packing and unpacking KV blocks is (kv/pack.py). */
#include "common.h"

#define MAX_NDIM 8
#define TILE 16
#define INLINE static inline __attribute__((always_inline))

/* 2-D part: rows x cols; strides in bytes; `a` is contiguous along cols on one side or the other or neither. */
INLINE void copy_items(uint8_t *dst, const uint8_t *src, int64_t rows, int64_t cols, const int64_t *ds,
                       const int64_t *ss, int item)
{
    for (int64_t r = 0; r < rows; r += TILE)
        for (int64_t c = 0; c < cols; c += TILE) {
            int64_t last_r = r + TILE < rows ? r + TILE : rows, last_c = c + TILE < cols ? c + TILE : cols;
            for (int64_t i = r; i < last_r; i++)
                for (int64_t j = c; j < last_c; j++)
                    memcpy(dst + i * ds[0] + j * ds[1], src + i * ss[0] + j * ss[1], (size_t)item);
        }
}

static void copy_plane(uint8_t *dst, const uint8_t *src, int64_t rows, int64_t cols, const int64_t *ds,
                       const int64_t *ss, int item)
{
    if (ds[1] == item && ss[1] == item) {
        for (int64_t r = 0; r < rows; r++)
            memcpy(dst + r * ds[0], src + r * ss[0], (size_t)(cols * item));
    } else if (item == 2) {
        copy_items(dst, src, rows, cols, ds, ss, 2);
    } else if (item == 4) {
        copy_items(dst, src, rows, cols, ds, ss, 4);
    } else {
        copy_items(dst, src, rows, cols, ds, ss, item);
    }
}

/* dst[...] = src[...]; 2 <= ndim <= 8; strides in bytes, may be anything that stays inside (Python's arrays do). */
PDX_API int PDX(strided_copy)(uint8_t *dst, const int64_t *dst_strides, const uint8_t *src, const int64_t *src_strides,
                              const int64_t *shape, int ndim, int item)
{
    if (ndim < 2 || ndim > MAX_NDIM)
        return -1;
    int outer = ndim - 2;
    int64_t index[MAX_NDIM] = {0}, total = 1;
    for (int k = 0; k < outer; k++)
        total *= shape[k];
    for (int64_t n = 0; n < total; n++) {
        copy_plane(dst, src, shape[outer], shape[outer + 1], dst_strides + outer, src_strides + outer, item);
        for (int k = outer - 1; k >= 0; k--) {
            dst += dst_strides[k];
            src += src_strides[k];
            if (++index[k] < shape[k])
                break;
            dst -= shape[k] * dst_strides[k];
            src -= shape[k] * src_strides[k];
            index[k] = 0;
        }
    }
    return 0;
}
