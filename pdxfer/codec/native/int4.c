/* int4: tiles of 32 tokens of one head; K with one range a channel, V with one a token and 32 channels. The same bits
 * as kernels/reference.py. A tile with a bad range gets parameters and codes 0; Python keeps it raw.
 *
 *   parameters of a tile   K: [dim] pairs      V: [tokens][ceil(dim / 32)] pairs
 *   codes of a tile        byte i = code[i] | code[i + half] << 4, half = (tokens * dim + 1) / 2 */
#include "floats.h"

#define TILE 32
#define MAX_DIM 1024
#define INLINE static inline __attribute__((always_inline))

INLINE size_t count_v(size_t dim)
{
    return (dim + TILE - 1) / TILE;
}

INLINE uint8_t quantise(float value, float lowest, float inverse)
{
    uint32_t q = float_to_bits((value - lowest) * inverse + ROUND_MAGIC) & 0x1FFu;
    return (uint8_t)(q > 15u ? 15u : q);
}

INLINE int32_t key_at(const uint8_t *src, size_t i, int dtype)
{
    return dtype == PDX_F32 ? key32(((const u32a *)src)[i]) : key16(((const u16a *)src)[i]);
}

/* codes [tokens][dim], one a byte; returns 0 for a bad tile */
INLINE int encode_k(const uint8_t *src, size_t tokens, size_t dim, int dtype, u16a *params, uint8_t *codes)
{
    int32_t least[MAX_DIM], most[MAX_DIM];
    float lowest[MAX_DIM], inverse[MAX_DIM];
    for (size_t d = 0; d < dim; d++)
        least[d] = most[d] = key_at(src, d, dtype);
    for (size_t t = 1; t < tokens; t++)
        for (size_t d = 0; d < dim; d++) {
            int32_t k = key_at(src, t * dim + d, dtype);
            least[d] = k < least[d] ? k : least[d];
            most[d] = k > most[d] ? k : most[d];
        }
    int good = 1;
    for (size_t d = 0; d < dim; d++) {
        uint16_t pair[2];
        good &= range_params(from_key(least[d], dtype), from_key(most[d], dtype), 15.0f, pair);
        params[2 * d] = pair[0];
        params[2 * d + 1] = pair[1];
        lowest[d] = load_bf16(pair[0]);
        inverse[d] = 1.0f / load_bf16(pair[1]);
    }
    if (!good)
        return 0;
    for (size_t t = 0; t < tokens; t++)
        for (size_t d = 0; d < dim; d++)
            codes[t * dim + d] = quantise(load_value(src, t * dim + d, dtype), lowest[d], inverse[d]);
    return 1;
}

INLINE int encode_v(const uint8_t *src, size_t tokens, size_t dim, int dtype, u16a *params, uint8_t *codes)
{
    size_t groups = count_v(dim);
    int good = 1;
    for (size_t t = 0; t < tokens; t++)
        for (size_t g = 0; g < groups; g++) {
            size_t first = t * dim + g * TILE, size = dim - g * TILE < TILE ? dim - g * TILE : TILE;
            int32_t least = INT32_MAX, most = INT32_MIN;
            for (size_t i = 0; i < size; i++) {
                int32_t k = key_at(src, first + i, dtype);
                least = k < least ? k : least;
                most = k > most ? k : most;
            }
            uint16_t pair[2];
            good &= range_params(from_key(least, dtype), from_key(most, dtype), 15.0f, pair);
            params[2 * (t * groups + g)] = pair[0];
            params[2 * (t * groups + g) + 1] = pair[1];
            float lowest = load_bf16(pair[0]), inverse = good ? 1.0f / load_bf16(pair[1]) : 0.0f;
            for (size_t i = 0; i < size; i++)
                codes[first + i] = quantise(load_value(src, first + i, dtype), lowest, inverse);
        }
    return good;
}

INLINE void decode_tile(const uint8_t *codes, const u16a *params, int is_v, size_t tokens, size_t dim, int dtype,
                        uint8_t *dst)
{
    size_t groups = count_v(dim);
    float lowest[MAX_DIM], step[MAX_DIM];
    if (!is_v)
        for (size_t d = 0; d < dim; d++) {
            lowest[d] = load_bf16(params[2 * d]);
            step[d] = load_bf16(params[2 * d + 1]);
        }
    for (size_t t = 0; t < tokens; t++) {
        if (is_v)
            for (size_t d = 0; d < dim; d++) {
                lowest[d] = load_bf16(params[2 * (t * groups + d / TILE)]);
                step[d] = load_bf16(params[2 * (t * groups + d / TILE) + 1]);
            }
        for (size_t d = 0; d < dim; d++)
            store_value(dst, t * dim + d, (float)(int32_t)codes[t * dim + d] * step[d] + lowest[d], dtype);
    }
}

INLINE void encode_planes(const uint8_t *src, size_t planes, size_t heads, size_t tokens, size_t dim, int dtype,
                          u16a *params, uint8_t *codes, uint8_t *bad)
{
    uint8_t wide[TILE * MAX_DIM + 1];
    size_t item = dtype == PDX_F32 ? 4 : 2;
    for (size_t p = 0; p < planes; p++) {
        int is_v = (p / heads) % 2;
        for (size_t first = 0; first < tokens; first += TILE) {
            size_t count = tokens - first < TILE ? tokens - first : TILE, values = count * dim, half = (values + 1) / 2;
            size_t pairs = is_v ? count * count_v(dim) : dim;
            int good = is_v ? encode_v(src, count, dim, dtype, params, wide)
                            : encode_k(src, count, dim, dtype, params, wide);
            *bad++ = (uint8_t)!good;
            if (good) {
                wide[values] = 0;
                for (size_t i = 0; i < half; i++)
                    codes[i] = (uint8_t)(wide[i] | wide[i + half] << 4);
            } else {
                memset(params, 0, pairs * 4);
                memset(codes, 0, half);
            }
            src += values * item;
            params += 2 * pairs;
            codes += half;
        }
    }
}

INLINE void decode_planes(const uint8_t *codes, const u16a *params, size_t planes, size_t heads, size_t tokens,
                          size_t dim, int dtype, uint8_t *dst)
{
    uint8_t wide[TILE * MAX_DIM + 1];
    size_t item = dtype == PDX_F32 ? 4 : 2;
    for (size_t p = 0; p < planes; p++) {
        int is_v = (p / heads) % 2;
        for (size_t first = 0; first < tokens; first += TILE) {
            size_t count = tokens - first < TILE ? tokens - first : TILE, values = count * dim, half = (values + 1) / 2;
            for (size_t i = 0; i < half; i++) {
                wide[i] = codes[i] & 15u;
                wide[i + half] = codes[i] >> 4;
            }
            decode_tile(wide, params, is_v, count, dim, dtype, dst);
            dst += values * item;
            params += 2 * (is_v ? count * count_v(dim) : dim);
            codes += half;
        }
    }
}

#define FOR_DIM(call, dtype)          \
    if (dim == 64)                    \
        call(64, dtype);              \
    else if (dim == 128)              \
        call(128, dtype);             \
    else                              \
        call(dim, dtype);
#define FOR_DTYPE(call)               \
    if (dtype == PDX_BF16) {          \
        FOR_DIM(call, PDX_BF16)       \
    } else if (dtype == PDX_F16) {    \
        FOR_DIM(call, PDX_F16)        \
    } else {                          \
        FOR_DIM(call, PDX_F32)        \
    }

/* Returns -1 and does nothing for a dim it has no room for. */
PDX_API int PDX(int4_encode)(const uint8_t *src, int64_t planes, int64_t heads, int64_t tokens, int64_t dim, int dtype,
                             u16a *params, uint8_t *codes, uint8_t *bad)
{
    if (dim > MAX_DIM || heads < 1)
        return -1;
#define CALL(d, t) \
    encode_planes(src, (size_t)planes, (size_t)heads, (size_t)tokens, (size_t)d, t, params, codes, bad)
    FOR_DTYPE(CALL)
#undef CALL
    return 0;
}

PDX_API int PDX(int4_decode)(const uint8_t *codes, const u16a *params, int64_t planes, int64_t heads, int64_t tokens,
                             int64_t dim, int dtype, uint8_t *dst)
{
    if (dim > MAX_DIM || heads < 1)
        return -1;
#define CALL(d, t) decode_planes(codes, params, (size_t)planes, (size_t)heads, (size_t)tokens, (size_t)d, t, dst)
    FOR_DTYPE(CALL)
#undef CALL
    return 0;
}
