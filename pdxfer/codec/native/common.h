/* What every C file of the codec library starts with. Files are compiled once per instruction set (build.py): a
 * function is declared `PDX_API PDX(name)(...)` and found by Python as name + suffix of the best set this CPU has.
 * All pointers may be unaligned. No function allocates, keeps state or trusts a length it can check. */
#ifndef PDX_COMMON_H
#define PDX_COMMON_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PDX_CAT2(a, b) a##b
#define PDX_CAT(a, b) PDX_CAT2(a, b)
#define PDX(name) PDX_CAT(name, PDX_SUFFIX)
#define PDX_API __attribute__((visibility("default")))

typedef uint16_t u16a __attribute__((aligned(1), may_alias));
typedef uint32_t u32a __attribute__((aligned(1), may_alias));
typedef uint64_t u64a __attribute__((aligned(1), may_alias));
typedef float f32a __attribute__((aligned(1), may_alias));

static inline float bits_to_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t float_to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

#endif
