/* The rANS coder as Python calls it, and histograms. Every write is checked against the capacity, every table index
 * against the number of tables. The encoder divides by a reciprocal that is exact for states below 2^31. */
#include "rans.h"

/* sym[rows][cols] out of words[num_words]; row i uses table[i] < num_tables of freq[num_tables][256].
 * slots: room for 4096 entries per table if `shared`; else for one table, filled anew for each row. */
PDX_API int PDX(rans_decode)(const u16a *words, int64_t num_words, const uint16_t *freq, int64_t num_tables,
                             const uint32_t *table, int64_t rows, int64_t cols, uint32_t *slots, int shared,
                             uint8_t *sym)
{
    rans_reader reader;
    int error = rans_check(freq, num_tables);
    if (!error)
        error = rans_open(&reader, words, num_words);
    for (int64_t t = 0; shared && !error && t < num_tables; t++)
        rans_slots(freq + 256 * t, slots + RANS_PROB * t);
    for (int64_t i = 0; i < rows && !error; i++) {
        if (table[i] >= num_tables)
            return RANS_BAD_TABLE;
        if (!shared)
            rans_slots(freq + 256 * (int64_t)table[i], slots);
        error = rans_row(&reader, shared ? slots + RANS_PROB * (int64_t)table[i] : slots, sym + i * cols, cols);
    }
    return error ? error : rans_close(&reader);
}

typedef struct {
    uint32_t rcp[256];
    uint32_t pack[256]; /* frequency | bias << 12 | shift << 25 */
} enc_table;

static void enc_build(const uint16_t *freq, enc_table *t)
{
    uint32_t first = 0;
    for (int s = 0; s < 256; s++) {
        uint32_t f = freq[s];
        if (f == 1) { /* x - 1 by the largest reciprocal; the bias makes up for it */
            t->rcp[s] = 0xFFFFFFFFu;
            t->pack[s] = 1u | (first + RANS_PROB - 1) << 12;
        } else if (f) {
            uint32_t shift = 32 - (uint32_t)__builtin_clz(f - 1);
            t->rcp[s] = (uint32_t)(((1ull << (shift + 31)) + f - 1) / f);
            t->pack[s] = f | first << 12 | (shift - 1) << 25;
        } else {
            t->rcp[s] = t->pack[s] = 0;
        }
        first += f;
    }
}

typedef struct {
    uint32_t x[RANS_LANES];
    u16a *out;
    int64_t pos;
} writer;

static int put_plain(writer *w, const enc_table *t, const uint8_t *sym, int64_t cols)
{
    for (int64_t i = cols - 1; i >= 0; i--) {
        uint32_t pack = t->pack[sym[i]], f = pack & 0xFFF, x = w->x[i & (RANS_LANES - 1)];
        if (!f)
            return RANS_BAD_SYMBOL;
        if (x >= f << (31 - RANS_BITS)) {
            if (w->pos < 1)
                return RANS_CUT;
            w->out[--w->pos] = (uint16_t)x;
            x >>= 16;
        }
        uint32_t d = (uint32_t)((uint64_t)x * t->rcp[sym[i]] >> 32) >> (pack >> 25);
        w->x[i & (RANS_LANES - 1)] = x + (pack >> 12 & 0x1FFF) + d * (RANS_PROB - f);
    }
    return RANS_OK;
}

#if defined(__AVX512BW__)
static int put_row(writer *w, const enc_table *t, const uint8_t *sym, int64_t cols)
{
    if (w->pos < cols + 16) /* too little room for a whole row at the worst: the checked way */
        return put_plain(w, t, sym, cols);
    int64_t full = cols / RANS_LANES * RANS_LANES;
    int error = put_plain(w, t, sym + full, cols - full);
    if (error)
        return error;
    __m512i x[4];
    for (int v = 0; v < 4; v++)
        x[v] = _mm512_loadu_si512(w->x + 16 * v);
    u16a *p = w->out + w->pos;
    __mmask16 bad = 0;
    const __m512i f12 = _mm512_set1_epi32(0xFFF), b13 = _mm512_set1_epi32(0x1FFF), one = _mm512_set1_epi32(RANS_PROB);
    for (int64_t i = full - RANS_LANES; i >= 0; i -= RANS_LANES)
        for (int v = 3; v >= 0; v--) {
            __m512i s = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(sym + i + 16 * v)));
            __m512i rcp = _mm512_i32gather_epi32(s, t->rcp, 4), pack = _mm512_i32gather_epi32(s, t->pack, 4);
            __m512i f = _mm512_and_si512(pack, f12);
            bad |= _mm512_testn_epi32_mask(f, f);
            __mmask16 m = _mm512_cmpge_epu32_mask(x[v], _mm512_slli_epi32(f, 31 - RANS_BITS));
            int n = __builtin_popcount(m);
            p -= n;
            __m256i words = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(m, x[v]));
            _mm256_mask_storeu_epi16(p, (__mmask16)((1u << n) - 1), words);
            __m512i y = _mm512_mask_srli_epi32(x[v], m, x[v], 16);
            __m512i even = _mm512_srli_epi64(_mm512_mul_epu32(y, rcp), 32);
            __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(y, 32), _mm512_srli_epi64(rcp, 32));
            __m512i d = _mm512_srlv_epi32(_mm512_mask_blend_epi32(0xAAAA, even, odd), _mm512_srli_epi32(pack, 25));
            __m512i bias = _mm512_and_si512(_mm512_srli_epi32(pack, 12), b13);
            x[v] = _mm512_add_epi32(_mm512_add_epi32(y, bias), _mm512_mullo_epi32(d, _mm512_sub_epi32(one, f)));
        }
    for (int v = 0; v < 4; v++)
        _mm512_storeu_si512(w->x + 16 * v, x[v]);
    w->pos = p - w->out;
    return bad ? RANS_BAD_SYMBOL : RANS_OK;
}
#else
#define put_row put_plain
#endif

/* The words end at out[capacity]; returns how many there are, or an error. tables: room for one 2 KiB entry per table
 * if `shared`, else for one. Other arguments as in rans_decode. */
PDX_API int64_t PDX(rans_encode)(const uint8_t *sym, int64_t rows, int64_t cols, const uint16_t *freq,
                                 int64_t num_tables, const uint32_t *table, void *tables, int shared, u16a *out,
                                 int64_t capacity)
{
    enc_table *built = tables;
    int error = rans_check(freq, num_tables);
    for (int64_t t = 0; shared && !error && t < num_tables; t++)
        enc_build(freq + 256 * t, built + t);
    writer w = {.out = out, .pos = capacity};
    for (int l = 0; l < RANS_LANES; l++)
        w.x[l] = RANS_LOW;
    for (int64_t i = rows - 1; i >= 0 && !error; i--) {
        if (table[i] >= num_tables)
            return RANS_BAD_TABLE;
        if (!shared)
            enc_build(freq + 256 * (int64_t)table[i], built);
        error = put_row(&w, shared ? built + table[i] : built, sym + i * cols, cols);
    }
    if (error)
        return error;
    if (w.pos < 2 * RANS_LANES)
        return RANS_CUT;
    for (int l = RANS_LANES - 1; l >= 0; l--) {
        out[--w.pos] = (uint16_t)w.x[l];
        out[--w.pos] = (uint16_t)(w.x[l] >> 16);
    }
    return capacity - w.pos;
}

/* counts[num_tables][256] += occurrences of each symbol in the rows that use the table. */
PDX_API int PDX(rans_count)(const uint8_t *sym, int64_t rows, int64_t cols, const uint32_t *table, int64_t num_tables,
                            uint32_t *counts)
{
    for (int64_t i = 0; i < rows; i++) {
        if (table[i] >= num_tables)
            return RANS_BAD_TABLE;
        uint32_t part[4][256] = {{0}};
        const uint8_t *row = sym + i * cols;
        int64_t j = 0;
        for (; j + 4 <= cols; j += 4) {
            part[0][row[j]]++;
            part[1][row[j + 1]]++;
            part[2][row[j + 2]]++;
            part[3][row[j + 3]]++;
        }
        for (; j < cols; j++)
            part[0][row[j]]++;
        uint32_t *count = counts + 256 * (int64_t)table[i];
        for (int s = 0; s < 256; s++)
            count[s] += part[0][s] + part[1][s] + part[2][s] + part[3][s];
    }
    return RANS_OK;
}
