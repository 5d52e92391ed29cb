/* lossless: exponents of groups of 64 values as 3-bit distances from the group's largest, in bit planes; the same
 * bytes as kernels/reference.py. A distance of 7 or more is an escape: the exponent follows in a list of its own.
 *
 *   bfloat16  s eeeeeeee mmmmmmm      rest byte: s mmmmmmm
 *   float16   s eeeee mmmmmmmmmm      rest byte: low 8 of m; three more planes: m8, m9, s
 *   a float32 is its high half, coded as bfloat16 (`stride` 2), and its low half, kept by Python as it is */
#include "common.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define GROUP 64
#define ESCAPE 7
#define INLINE static inline __attribute__((always_inline))

/* bit `bit` of each of 64 bytes */
INLINE uint64_t gather_plane(const uint8_t *bytes, int bit)
{
#if defined(__AVX512BW__)
    return _mm512_test_epi8_mask(_mm512_loadu_si512(bytes), _mm512_set1_epi8((char)(1 << bit)));
#elif defined(__AVX2__)
    __m256i a = _mm256_slli_epi16(_mm256_loadu_si256((const __m256i *)bytes), 7 - bit);
    __m256i b = _mm256_slli_epi16(_mm256_loadu_si256((const __m256i *)(bytes + 32)), 7 - bit);
    return (uint32_t)_mm256_movemask_epi8(a) | (uint64_t)(uint32_t)_mm256_movemask_epi8(b) << 32;
#else
    uint64_t plane = 0;
    for (int j = 0; j < 8; j++) {
        uint64_t x = (((const u64a *)bytes)[j] >> bit) & 0x0101010101010101u;
        plane |= ((x * 0x0102040810204080u) >> 56) << (8 * j);
    }
    return plane;
#endif
}

/* add bit i of `plane` << bit to byte i, 64 bytes */
INLINE void spread_plane(uint64_t plane, int bit, uint8_t *bytes)
{
#if defined(__AVX512BW__)
    __m512i old = _mm512_loadu_si512(bytes);
    _mm512_storeu_si512(bytes, _mm512_or_si512(old, _mm512_maskz_set1_epi8(plane, (char)(1 << bit))));
#else
    for (int j = 0; j < 8; j++) {
        uint64_t x = ((plane >> (8 * j)) & 0xFFu) * 0x0101010101010101u & 0x8040201008040201u;
        x = ((x + 0x7F7F7F7F7F7F7F7Fu) | x) >> 7 & 0x0101010101010101u;
        ((u64a *)bytes)[j] |= x << bit;
    }
#endif
}

/* Returns the number of escapes, or -1 when they are more than `room`. */
INLINE int64_t encode_groups(const u16a *src, int stride, int64_t groups, int half, uint8_t *base, u64a *planes,
                             u64a *extra, uint8_t *rest, u16a *counts, uint8_t *escapes, int64_t room)
{
    int64_t used = 0;
    for (int64_t g = 0; g < groups; g++, src += GROUP * stride, rest += GROUP) {
        uint8_t exponent[GROUP], code[GROUP], high[GROUP], most = 0;
        for (int i = 0; i < GROUP; i++) {
            uint16_t u = src[i * stride];
            exponent[i] = half ? (u >> 10) & 31u : (u >> 7) & 255u;
            rest[i] = half ? (uint8_t)u : (uint8_t)((u >> 8 & 0x80u) | (u & 0x7Fu));
            if (half)
                high[i] = (uint8_t)((u >> 8 & 3u) | (u >> 13 & 4u));
        }
        for (int i = 0; i < GROUP; i++)
            most = exponent[i] > most ? exponent[i] : most;
        for (int i = 0; i < GROUP; i++) {
            uint8_t d = (uint8_t)(most - exponent[i]);
            code[i] = d < ESCAPE ? d : ESCAPE;
        }
        base[g] = most;
        uint64_t escaped = ~(uint64_t)0;
        for (int bit = 0; bit < 3; bit++) {
            uint64_t plane = gather_plane(code, bit);
            planes[3 * g + bit] = plane;
            escaped &= plane;
            if (half)
                extra[3 * g + bit] = gather_plane(high, bit);
        }
        int count = __builtin_popcountll(escaped);
        if (used + count > room)
            return -1;
        for (; escaped; escaped &= escaped - 1)
            escapes[used++] = exponent[__builtin_ctzll(escaped)];
        if (g % GROUP == 0)
            counts[g / GROUP] = 0;
        counts[g / GROUP] = (uint16_t)(counts[g / GROUP] + count);
    }
    return used;
}

/* Returns 0, or -1 when the planes ask for other than `available` escapes, or `counts` says otherwise. */
INLINE int decode_groups(const uint8_t *base, const u64a *planes, const u64a *extra, const uint8_t *rest,
                         const u16a *counts, const uint8_t *escapes, int64_t available, int64_t groups, int half,
                         u16a *dst, int stride)
{
    const uint8_t *end = escapes + available;
    int64_t segment = 0;
    for (int64_t g = 0; g < groups; g++, dst += GROUP * stride, rest += GROUP) {
        uint8_t exponent[GROUP] = {0}, high[GROUP] = {0};
        uint64_t escaped = ~(uint64_t)0;
        for (int bit = 0; bit < 3; bit++) {
            uint64_t plane = planes[3 * g + bit];
            spread_plane(plane, bit, exponent);
            escaped &= plane;
            if (half)
                spread_plane(extra[3 * g + bit], bit, high);
        }
        uint8_t most = base[g];
        for (int i = 0; i < GROUP; i++)
            exponent[i] = (uint8_t)(most - exponent[i]);
        int count = __builtin_popcountll(escaped);
        if (end - escapes < count)
            return -1;
        for (; escaped; escaped &= escaped - 1)
            exponent[__builtin_ctzll(escaped)] = *escapes++;
        for (int i = 0; i < GROUP; i++) {
            uint16_t r = rest[i], e = exponent[i];
            dst[i * stride] = half ? (uint16_t)(r | (high[i] & 3u) << 8 | (e & 31u) << 10 | (high[i] & 4u) << 13)
                                   : (uint16_t)((r & 0x80u) << 8 | e << 7 | (r & 0x7Fu));
        }
        segment += count;
        if (g % GROUP == GROUP - 1 || g == groups - 1) {
            if (segment != counts[g / GROUP])
                return -1;
            segment = 0;
        }
    }
    return escapes == end ? 0 : -1;
}

PDX_API int64_t PDX(lossless_encode)(const u16a *src, int stride, int64_t groups, int half, uint8_t *base, u64a *planes,
                                     u64a *extra, uint8_t *rest, u16a *counts, uint8_t *escapes, int64_t room)
{
    if (half)
        return encode_groups(src, 1, groups, 1, base, planes, extra, rest, counts, escapes, room);
    if (stride == 2)
        return encode_groups(src, 2, groups, 0, base, planes, extra, rest, counts, escapes, room);
    return encode_groups(src, 1, groups, 0, base, planes, extra, rest, counts, escapes, room);
}

PDX_API int PDX(lossless_decode)(const uint8_t *base, const u64a *planes, const u64a *extra, const uint8_t *rest,
                                 const u16a *counts, const uint8_t *escapes, int64_t available, int64_t groups, int half,
                                 u16a *dst, int stride)
{
    if (half)
        return decode_groups(base, planes, extra, rest, counts, escapes, available, groups, 1, dst, 1);
    if (stride == 2)
        return decode_groups(base, planes, extra, rest, counts, escapes, available, groups, 0, dst, 2);
    return decode_groups(base, planes, extra, rest, counts, escapes, available, groups, 0, dst, 1);
}
