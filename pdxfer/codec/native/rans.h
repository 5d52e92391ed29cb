/* Interleaved rANS: 64 lanes, 12-bit frequencies, 16-bit words. Lane l of a row holds its columns l, l + 64, ...
 * The decoder is here, for rans.c and klt.c; codec/rans_numba.py is the same coder, bit for bit. Every read is checked
 * against the end of the words.
 *
 * slots[4096] of a table: symbol | frequency << 8 | (slot - first slot of the symbol) << 20. A frequency is at most
 * 4095, so that it fits its 12 bits. */
#ifndef PDX_RANS_H
#define PDX_RANS_H
#include "common.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define RANS_LANES 64
#define RANS_BITS 12
#define RANS_PROB (1u << RANS_BITS)
#define RANS_LOW (1u << 15) /* states live in [2^15, 2^31) */

enum { RANS_OK = 0, RANS_CUT = -1, RANS_BAD_TABLE = -2, RANS_BAD_SYMBOL = -3, RANS_BAD_END = -4 };

typedef struct {
    uint32_t x[RANS_LANES];
    const u16a *words;
    int64_t pos, end; /* words[pos .. end) are still to be read */
} rans_reader;

static inline int rans_check(const uint16_t *freq, int64_t num_tables)
{
    for (int64_t t = 0; t < num_tables; t++) {
        uint32_t sum = 0, bad = 0;
        for (int s = 0; s < 256; s++) {
            uint32_t f = freq[256 * t + s];
            sum += f;
            bad |= f >= RANS_PROB;
        }
        if (bad || sum != RANS_PROB)
            return RANS_BAD_TABLE;
    }
    return RANS_OK;
}

static inline void rans_slots(const uint16_t *freq, uint32_t *slots)
{
    uint32_t *to = slots, *const end = slots + RANS_PROB;
    for (uint32_t s = 0; s < 256; s++) {
        uint32_t f = freq[s], e = s | f << 8;
        for (uint32_t k = 0; k < f && to < end; k++, e += 1u << 20)
            *to++ = e;
    }
}

static inline int rans_open(rans_reader *r, const u16a *words, int64_t num_words)
{
    if (num_words < 2 * RANS_LANES)
        return RANS_CUT;
    for (int l = 0; l < RANS_LANES; l++)
        r->x[l] = (uint32_t)words[2 * l] << 16 | words[2 * l + 1];
    r->words = words;
    r->pos = 2 * RANS_LANES;
    r->end = num_words;
    return RANS_OK;
}

static inline int rans_close(const rans_reader *r)
{
    if (r->pos != r->end)
        return RANS_BAD_END;
    for (int l = 0; l < RANS_LANES; l++)
        if (r->x[l] != RANS_LOW)
            return RANS_BAD_END;
    return RANS_OK;
}

static inline int rans_row_plain(rans_reader *r, const uint32_t *slots, uint8_t *sym, int64_t cols)
{
    for (int64_t i = 0; i < cols; i++) {
        uint32_t x = r->x[i & (RANS_LANES - 1)], e = slots[x & (RANS_PROB - 1)];
        sym[i] = (uint8_t)e;
        x = (e >> 8 & 0xFFF) * (x >> RANS_BITS) + (e >> 20);
        if (x < RANS_LOW) {
            if (r->pos >= r->end)
                return RANS_CUT;
            x = x << 16 | r->words[r->pos++];
        }
        r->x[i & (RANS_LANES - 1)] = x;
    }
    return RANS_OK;
}

#if defined(__AVX512BW__)

/* 16 lanes; `m`: those that hold a column. Loads 16 words at *w, uses as many as lanes that ran low. */
static inline __m512i rans_step(__m512i x, __m512i e, __mmask16 m, const u16a **w)
{
    __m512i f = _mm512_and_si512(_mm512_srli_epi32(e, 8), _mm512_set1_epi32(0xFFF));
    __m512i y = _mm512_add_epi32(_mm512_mullo_epi32(f, _mm512_srli_epi32(x, RANS_BITS)), _mm512_srli_epi32(e, 20));
    __mmask16 low = _mm512_mask_cmplt_epu32_mask(m, y, _mm512_set1_epi32(RANS_LOW));
    __m512i n = _mm512_maskz_expand_epi32(low, _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)*w)));
    *w += __builtin_popcount(low);
    y = _mm512_mask_or_epi32(y, low, _mm512_slli_epi32(y, 16), n);
    return _mm512_mask_mov_epi32(x, m, y);
}

static inline int rans_row(rans_reader *r, const uint32_t *slots, uint8_t *sym, int64_t cols)
{
    __m512i x0 = _mm512_loadu_si512(r->x), x1 = _mm512_loadu_si512(r->x + 16);
    __m512i x2 = _mm512_loadu_si512(r->x + 32), x3 = _mm512_loadu_si512(r->x + 48);
    const __m512i low12 = _mm512_set1_epi32(RANS_PROB - 1);
    const u16a *w = r->words + r->pos, *const end = r->words + r->end;
    int64_t i = 0;
    /* a step of 64 columns uses at most 64 words and touches at most 15 beyond those */
    for (; i + RANS_LANES <= cols && end - w >= RANS_LANES + 16; i += RANS_LANES) {
        __m512i e0 = _mm512_i32gather_epi32(_mm512_and_si512(x0, low12), slots, 4);
        __m512i e1 = _mm512_i32gather_epi32(_mm512_and_si512(x1, low12), slots, 4);
        __m512i e2 = _mm512_i32gather_epi32(_mm512_and_si512(x2, low12), slots, 4);
        __m512i e3 = _mm512_i32gather_epi32(_mm512_and_si512(x3, low12), slots, 4);
        _mm_storeu_si128((__m128i *)(sym + i), _mm512_cvtepi32_epi8(e0));
        _mm_storeu_si128((__m128i *)(sym + i + 16), _mm512_cvtepi32_epi8(e1));
        _mm_storeu_si128((__m128i *)(sym + i + 32), _mm512_cvtepi32_epi8(e2));
        _mm_storeu_si128((__m128i *)(sym + i + 48), _mm512_cvtepi32_epi8(e3));
        x0 = rans_step(x0, e0, 0xFFFF, &w);
        x1 = rans_step(x1, e1, 0xFFFF, &w);
        x2 = rans_step(x2, e2, 0xFFFF, &w);
        x3 = rans_step(x3, e3, 0xFFFF, &w);
    }
    if (i < cols && cols - i < RANS_LANES && end - w >= RANS_LANES + 16) { /* the row's last, incomplete step */
        uint64_t all = (1ull << (cols - i)) - 1;
        __m512i *x[4] = {&x0, &x1, &x2, &x3};
        for (int v = 0; v < 4; v++) {
            __mmask16 m = (__mmask16)(all >> 16 * v);
            __m512i e = _mm512_i32gather_epi32(_mm512_and_si512(*x[v], low12), slots, 4);
            _mm512_mask_cvtepi32_storeu_epi8(sym + i + 16 * v, m, e);
            *x[v] = rans_step(*x[v], e, m, &w);
        }
        i = cols;
    }
    _mm512_storeu_si512(r->x, x0);
    _mm512_storeu_si512(r->x + 16, x1);
    _mm512_storeu_si512(r->x + 32, x2);
    _mm512_storeu_si512(r->x + 48, x3);
    r->pos = w - r->words;
    return i < cols ? rans_row_plain(r, slots, sym + i, cols - i) : RANS_OK; /* i is a multiple of 64: lanes line up */
}

#elif defined(__AVX2__)

/* For 8 lanes of which those in mask `m` (bits) ran low: which of the next words each takes, as 8 nibbles. */
static inline __m256i rans_spread(uint32_t m)
{
    uint64_t bytes = _pdep_u64(m, 0x0101010101010101ull) * 0xFF;
    uint64_t order = _pdep_u64(0x0706050403020100ull, bytes);
    return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)order));
}

static inline int rans_row(rans_reader *r, const uint32_t *slots, uint8_t *sym, int64_t cols)
{
    const __m256i low12 = _mm256_set1_epi32(RANS_PROB - 1), mask12 = _mm256_set1_epi32(0xFFF);
    const __m256i limit = _mm256_set1_epi32(RANS_LOW);
    const __m256i first = _mm256_set1_epi32(0x0C080400);
    const u16a *w = r->words + r->pos, *const end = r->words + r->end;
    int64_t i = 0;
    for (; i + RANS_LANES <= cols && end - w >= RANS_LANES + 8; i += RANS_LANES)
        for (int v = 0; v < 8; v++) {
            __m256i x = _mm256_loadu_si256((const __m256i *)(r->x + 8 * v));
            __m256i e = _mm256_i32gather_epi32((const int *)slots, _mm256_and_si256(x, low12), 4);
            __m256i b = _mm256_shuffle_epi8(e, first); /* the symbols: the low byte of each */
            uint32_t s0 = (uint32_t)_mm256_extract_epi32(b, 0), s1 = (uint32_t)_mm256_extract_epi32(b, 4);
            memcpy(sym + i + 8 * v, &s0, 4);
            memcpy(sym + i + 8 * v + 4, &s1, 4);
            __m256i f = _mm256_and_si256(_mm256_srli_epi32(e, 8), mask12);
            __m256i y =
                _mm256_add_epi32(_mm256_mullo_epi32(f, _mm256_srli_epi32(x, RANS_BITS)), _mm256_srli_epi32(e, 20));
            __m256i low = _mm256_cmpgt_epi32(limit, y); /* states are below 2^31: signed is right */
            uint32_t m = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(low));
            __m256i n = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)w));
            n = _mm256_permutevar8x32_epi32(n, rans_spread(m));
            y = _mm256_blendv_epi8(y, _mm256_or_si256(_mm256_slli_epi32(y, 16), n), low);
            w += __builtin_popcount(m);
            _mm256_storeu_si256((__m256i *)(r->x + 8 * v), y);
        }
    r->pos = w - r->words;
    return i < cols ? rans_row_plain(r, slots, sym + i, cols - i) : RANS_OK;
}

#else

static inline int rans_row(rans_reader *r, const uint32_t *slots, uint8_t *sym, int64_t cols)
{
    return rans_row_plain(r, slots, sym, cols);
}

#endif
#endif
