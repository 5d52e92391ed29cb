/* bfloat16, float16, float32 <-> float, by integer arithmetic: the same bits in every instruction set, and in
 * kernels/reference.py and kernels/jit.py. Stores round to nearest even; float16 saturates instead of overflowing. */
#ifndef PDX_FLOATS_H
#define PDX_FLOATS_H

#include "common.h"

enum { PDX_BF16 = 0, PDX_F16 = 1, PDX_F32 = 2 };

#define TINY 7.888609052210118e-31f /* 2^-100: no scale is smaller, so that its inverse is finite */
#define HUGE_RANGE 1e38f            /* units that span more (or hold inf, NaN) are kept as they are */
#define ROUND_MAGIC 12582912.0f     /* 1.5 * 2^23: adding it rounds to an integer, to nearest even */

static inline float load_bf16(uint16_t bits)
{
    return bits_to_float((uint32_t)bits << 16);
}

static inline float load_f16(uint16_t bits)
{
    uint32_t rest = bits & 0x7FFFu, sign = (uint32_t)(bits & 0x8000u) << 16;
    float finite = bits_to_float(rest << 13) * 5.192296858534828e33f; /* 2^112 */
    uint32_t special = 0x7F800000u | (rest << 13);
    return bits_to_float((rest >= 0x7C00u ? special : float_to_bits(finite)) | sign);
}

static inline uint16_t store_bf16(float value)
{
    uint32_t bits = float_to_bits(value);
    return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

static inline uint16_t store_f16(float value)
{
    uint32_t bits = float_to_bits(value), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7FFFFFFFu;
    uint32_t normal = (rest + 0xFFFu + ((rest >> 13) & 1u) - 0x38000000u) >> 13;
    uint32_t small = float_to_bits(bits_to_float(rest) + 0.5f) - 0x3F000000u; /* steps of 2^-24 */
    uint32_t half = rest < 0x38800000u ? small : normal;
    return (uint16_t)((half > 0x7BFFu || rest >= 0x47800000u ? 0x7BFFu : half) | sign);
}

static inline float load_value(const uint8_t *src, size_t i, int dtype)
{
    if (dtype == PDX_BF16)
        return load_bf16(((const u16a *)src)[i]);
    if (dtype == PDX_F16)
        return load_f16(((const u16a *)src)[i]);
    return ((const f32a *)src)[i];
}

static inline void store_value(uint8_t *dst, size_t i, float value, int dtype)
{
    if (dtype == PDX_BF16)
        ((u16a *)dst)[i] = store_bf16(value);
    else if (dtype == PDX_F16)
        ((u16a *)dst)[i] = store_f16(value);
    else
        ((f32a *)dst)[i] = value;
}

/* Integers in the order of the values they stand for (-0 below +0, NaN outermost); own inverse. */
static inline int16_t key16(uint16_t bits)
{
    int16_t k = (int16_t)bits;
    return (int16_t)(k ^ ((k >> 15) & 0x7FFF));
}

static inline int32_t key32(uint32_t bits)
{
    int32_t k = (int32_t)bits;
    return k ^ ((k >> 31) & 0x7FFFFFFF);
}

static inline float from_key(int32_t key, int dtype)
{
    if (dtype == PDX_F32)
        return bits_to_float((uint32_t)key32((uint32_t)key));
    uint16_t bits = (uint16_t)key16((uint16_t)key);
    return dtype == PDX_BF16 ? load_bf16(bits) : load_f16(bits);
}

/* bfloat16 not above `value`; not below `value` >= 0. */
static inline uint16_t bf16_down(float value)
{
    uint32_t bits = float_to_bits(value);
    return (uint16_t)((bits >> 16) + ((bits >> 31) && (bits & 0xFFFFu)));
}

static inline uint16_t bf16_up(float value)
{
    uint32_t bits = float_to_bits(value);
    return (uint16_t)((bits >> 16) + ((bits & 0xFFFFu) != 0));
}

/* Parameters of values in [lo, hi] in `steps` steps: {lowest, step} in bfloat16. Returns 0 if they span too much. */
static inline int range_params(float lo, float hi, float steps, uint16_t *params)
{
    uint16_t lowest = bf16_down(lo + 0.0f); /* never -0 */
    float range = hi - load_bf16(lowest);
    if (!(hi - lo < HUGE_RANGE && range < HUGE_RANGE)) {
        params[0] = params[1] = 0;
        return 0;
    }
    float step = range / steps;
    params[0] = lowest;
    params[1] = bf16_up(step < TINY ? TINY : step);
    return 1;
}

#endif
