/* int8 and fp8: rows of `dim` values (one token of one head), each with its own scale. The same bits as
 * kernels/reference.py. `bad` rows (inf, NaN, or a span that float32 cannot hold) get codes 0; Python keeps them raw. */
#include "floats.h"

#define INLINE static inline __attribute__((always_inline))

INLINE void row_range(const uint8_t *row, size_t dim, int dtype, float *lo, float *hi)
{
    if (dtype == PDX_F32) {
        const u32a *bits = (const u32a *)row;
        int32_t least = INT32_MAX, most = INT32_MIN;
        for (size_t i = 0; i < dim; i++) {
            int32_t k = key32(bits[i]);
            least = k < least ? k : least;
            most = k > most ? k : most;
        }
        *lo = from_key(least, dtype);
        *hi = from_key(most, dtype);
        return;
    }
    const u16a *bits = (const u16a *)row;
    int16_t least = INT16_MAX, most = INT16_MIN;
    for (size_t i = 0; i < dim; i++) {
        int16_t k = key16(bits[i]);
        least = k < least ? k : least;
        most = k > most ? k : most;
    }
    *lo = from_key(least, dtype);
    *hi = from_key(most, dtype);
}

INLINE void int8_encode_rows(const uint8_t *src, size_t rows, size_t dim, int dtype, u16a *params, uint8_t *codes,
                             uint8_t *bad)
{
    size_t row_bytes = dim * (dtype == PDX_F32 ? 4 : 2);
    for (size_t r = 0; r < rows; r++) {
        const uint8_t *row = src + r * row_bytes;
        uint8_t *out = codes + r * dim;
        float lo, hi;
        row_range(row, dim, dtype, &lo, &hi);
        uint16_t pair[2];
        bad[r] = !range_params(lo, hi, 255.0f, pair);
        params[2 * r] = pair[0];
        params[2 * r + 1] = pair[1];
        if (bad[r]) {
            memset(out, 0, dim);
            continue;
        }
        float lowest = load_bf16(pair[0]), inverse = 1.0f / load_bf16(pair[1]);
        for (size_t i = 0; i < dim; i++) {
            float v = (load_value(row, i, dtype) - lowest) * inverse;
            uint32_t q = float_to_bits(v + ROUND_MAGIC) & 0x1FFu;
            out[i] = (uint8_t)(q > 255u ? 255u : q);
        }
    }
}

INLINE void int8_decode_rows(const uint8_t *codes, const u16a *params, size_t rows, size_t dim, int dtype, uint8_t *dst)
{
    size_t row_bytes = dim * (dtype == PDX_F32 ? 4 : 2);
    for (size_t r = 0; r < rows; r++) {
        float lowest = load_bf16(params[2 * r]), step = load_bf16(params[2 * r + 1]);
        const uint8_t *in = codes + r * dim;
        uint8_t *row = dst + r * row_bytes;
        for (size_t i = 0; i < dim; i++)
            store_value(row, i, (float)(int32_t)in[i] * step + lowest, dtype);
    }
}

INLINE uint8_t e4m3(float y)
{
    uint32_t bits = float_to_bits(y), rest = bits & 0x7FFFFFFFu;
    uint32_t normal = ((rest + 0x7FFFFu + ((rest >> 20) & 1u)) >> 20) - 960u;
    uint32_t small = float_to_bits(bits_to_float(rest) + 16384.0f) - 0x46800000u; /* steps of 2^-9 */
    uint32_t code = rest < 0x3C800000u ? small : normal;
    return (uint8_t)((code > 0x7Eu ? 0x7Eu : code) | ((bits >> 24) & 0x80u));
}

INLINE float from_e4m3(uint8_t code)
{
    uint32_t rest = code & 0x7Fu;
    float small = (float)(int32_t)rest * 0.001953125f; /* 2^-9 */
    uint32_t bits = rest < 8u ? float_to_bits(small) : (rest << 20) + 0x3C000000u;
    return bits_to_float(bits | ((uint32_t)(code & 0x80u) << 24));
}

INLINE void fp8_encode_rows(const uint8_t *src, size_t rows, size_t dim, int dtype, u16a *params, uint8_t *codes,
                            uint8_t *bad)
{
    size_t row_bytes = dim * (dtype == PDX_F32 ? 4 : 2);
    for (size_t r = 0; r < rows; r++) {
        const uint8_t *row = src + r * row_bytes;
        uint8_t *out = codes + r * dim;
        float largest;
        if (dtype == PDX_F32) {
            uint32_t most = 0;
            for (size_t i = 0; i < dim; i++) {
                uint32_t k = ((const u32a *)row)[i] & 0x7FFFFFFFu;
                most = k > most ? k : most;
            }
            largest = bits_to_float(most);
        } else {
            uint16_t most = 0;
            for (size_t i = 0; i < dim; i++) {
                uint16_t k = ((const u16a *)row)[i] & 0x7FFFu;
                most = k > most ? k : most;
            }
            largest = dtype == PDX_BF16 ? load_bf16(most) : load_f16(most);
        }
        bad[r] = !(largest < HUGE_RANGE);
        if (bad[r]) {
            params[r] = 0;
            memset(out, 0, dim);
            continue;
        }
        float step = largest / 448.0f;
        params[r] = bf16_up(step < TINY ? TINY : step);
        float inverse = 1.0f / load_bf16(params[r]);
        for (size_t i = 0; i < dim; i++)
            out[i] = e4m3(load_value(row, i, dtype) * inverse);
    }
}

INLINE void fp8_decode_rows(const uint8_t *codes, const u16a *params, size_t rows, size_t dim, int dtype, uint8_t *dst)
{
    size_t row_bytes = dim * (dtype == PDX_F32 ? 4 : 2);
    for (size_t r = 0; r < rows; r++) {
        float scale = load_bf16(params[r]);
        const uint8_t *in = codes + r * dim;
        uint8_t *row = dst + r * row_bytes;
        for (size_t i = 0; i < dim; i++)
            store_value(row, i, from_e4m3(in[i]) * scale, dtype);
    }
}

/* Each kernel once per dtype and for the two common head dims, so that the compiler knows both. */
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

PDX_API void PDX(int8_encode)(const uint8_t *src, int64_t rows, int64_t dim, int dtype, u16a *params, uint8_t *codes,
                              uint8_t *bad)
{
#define CALL(d, t) int8_encode_rows(src, (size_t)rows, (size_t)d, t, params, codes, bad)
    FOR_DTYPE(CALL)
#undef CALL
}

PDX_API void PDX(int8_decode)(const uint8_t *codes, const u16a *params, int64_t rows, int64_t dim, int dtype,
                              uint8_t *dst)
{
#define CALL(d, t) int8_decode_rows(codes, params, (size_t)rows, (size_t)d, t, dst)
    FOR_DTYPE(CALL)
#undef CALL
}

PDX_API void PDX(fp8_encode)(const uint8_t *src, int64_t rows, int64_t dim, int dtype, u16a *params, uint8_t *codes,
                             uint8_t *bad)
{
#define CALL(d, t) fp8_encode_rows(src, (size_t)rows, (size_t)d, t, params, codes, bad)
    FOR_DTYPE(CALL)
#undef CALL
}

PDX_API void PDX(fp8_decode)(const uint8_t *codes, const u16a *params, int64_t rows, int64_t dim, int dtype,
                             uint8_t *dst)
{
#define CALL(d, t) fp8_decode_rows(codes, params, (size_t)rows, (size_t)d, t, dst)
    FOR_DTYPE(CALL)
#undef CALL
}
