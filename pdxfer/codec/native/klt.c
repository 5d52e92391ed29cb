/* Planes of KV values ↔ symbols: channel means, uniform steps, and (with weights) a linear transform over the channels
 * of a plane, RoPE taken off before it. A plane is [H][T][D] values: some heads of one layer's K or V; its channel c is
 * (head c / D, dim c % D). Transforms are in integers, so that every version of this code, codec/klt_numba.py
 * included, gives the same bits; sums fit 32 bits because codec/tables.py bounds the weights.
 *
 * Pair matrices are [n / 2][columns][2] int16: two rows side by side, as the multiply-add instructions want them. */
#include "rans.h"

typedef struct {
    int64_t num_heads, head_dim, channels; /* channels = num_heads * head_dim */
    int64_t tokens, skip, stride; /* coded tokens; tokens before them; tokens of a head in memory */
    int64_t rotary; /* dims that RoPE turns, 0: none */
    int64_t wide; /* 4-byte floats instead of bfloat16 */
} geometry;

#define STEP_TOKENS 8
#define MAX_CHANNELS 512
#define MAGIC 12582912.0f /* x + MAGIC - MAGIC rounds to nearest even, |x| < 2^22 */

static inline float round_even(float x)
{
    return x + MAGIC - MAGIC;
}

static inline float magnitude(float x)
{
    return bits_to_float(float_to_bits(x) & 0x7FFFFFFF);
}

static void load_token(const geometry *g, const uint8_t *plane, int64_t t, float *x)
{
    for (int64_t h = 0; h < g->num_heads; h++, x += g->head_dim) {
        int64_t at = (h * g->stride + g->skip + t) * g->head_dim;
        if (g->wide) {
            memcpy(x, plane + 4 * at, 4 * (size_t)g->head_dim);
        } else {
            const u16a *from = (const u16a *)(plane + 2 * at);
            for (int64_t d = 0; d < g->head_dim; d++)
                x[d] = bits_to_float((uint32_t)from[d] << 16);
        }
    }
}

static void store_token(const geometry *g, uint8_t *plane, int64_t t, const float *x)
{
    for (int64_t h = 0; h < g->num_heads; h++, x += g->head_dim) {
        int64_t at = (h * g->stride + g->skip + t) * g->head_dim;
        if (g->wide) {
            memcpy(plane + 4 * at, x, 4 * (size_t)g->head_dim);
        } else {
            u16a *to = (u16a *)(plane + 2 * at);
            for (int64_t d = 0; d < g->head_dim; d++) {
                uint32_t u = float_to_bits(x[d]);
                to[d] = (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
            }
        }
    }
}

/* Turn each head's pairs (i, i + rotary / 2); `angles`: cosines, then sines, of this token; sign -1 turns back. */
static void turn(const geometry *g, const float *angles, float sign, float *restrict x)
{
    const int64_t half = g->rotary / 2;
    const float *cosine = angles, *sine = angles + half;
    for (int64_t h = 0; h < g->num_heads; h++, x += g->head_dim)
        for (int64_t i = 0; i < half; i++) {
            float a = x[i], b = x[i + half], s = sign * sine[i];
            float left = a * cosine[i], right = b * s, up = b * cosine[i], down = a * s;
            x[i] = left - right;
            x[i + half] = up + down;
        }
}

/* ------------------------------------------------------------ pair products: sums[STEP_TOKENS][columns] = in · matrix */

#if defined(__AVX512BW__)
#define VEC __m512i
#define WIDTH 16
#define VZERO _mm512_setzero_si512()
#define VLOAD(p) _mm512_loadu_si512(p)
#define VSTORE(p, v) _mm512_storeu_si512(p, v)
#define VSET(x) _mm512_set1_epi32(x)
#define VDOT(a, x, y) _mm512_add_epi32(a, _mm512_madd_epi16(x, y))
#define BLOCK 3
#elif defined(__AVX2__)
#define VEC __m256i
#define WIDTH 8
#define VZERO _mm256_setzero_si256()
#define VLOAD(p) _mm256_loadu_si256((const __m256i *)(p))
#define VSTORE(p, v) _mm256_storeu_si256((__m256i *)(p), v)
#define VSET(x) _mm256_set1_epi32(x)
#define VDOT(a, x, y) _mm256_add_epi32(a, _mm256_madd_epi16(x, y))
#define BLOCK 1
#elif defined(__x86_64__)
#define VEC __m128i
#define WIDTH 4
#define VZERO _mm_setzero_si128()
#define VLOAD(p) _mm_loadu_si128((const __m128i *)(p))
#define VSTORE(p, v) _mm_storeu_si128((__m128i *)(p), v)
#define VSET(x) _mm_set1_epi32(x)
#define VDOT(a, x, y) _mm_add_epi32(a, _mm_madd_epi16(x, y))
#define BLOCK 1
#endif

#ifdef VEC
/* in: pair k of token t at in[k * pair_step + t * token_step]; columns are a multiple of WIDTH. */
#define PRODUCTS(NAME, ATTRIBUTE, DOT)                                                                                 \
    ATTRIBUTE static void NAME(const uint32_t *in, int64_t pair_step, int64_t token_step, int64_t pairs,               \
                               const int16_t *matrix, int64_t row, int64_t columns, int32_t *sums)                     \
    {                                                                                                                  \
        int64_t c = 0;                                                                                                 \
        for (; c + BLOCK * WIDTH <= columns; c += BLOCK * WIDTH) {                                                     \
            VEC a[STEP_TOKENS][BLOCK];                                                                                 \
            for (int t = 0; t < STEP_TOKENS; t++)                                                                      \
                for (int v = 0; v < BLOCK; v++)                                                                        \
                    a[t][v] = VZERO;                                                                                   \
            for (int64_t k = 0; k < pairs; k++) {                                                                      \
                const int16_t *m = matrix + 2 * (k * row + c);                                                         \
                VEC w[BLOCK];                                                                                          \
                for (int v = 0; v < BLOCK; v++)                                                                        \
                    w[v] = VLOAD(m + 2 * WIDTH * v);                                                                   \
                for (int t = 0; t < STEP_TOKENS; t++) {                                                                \
                    VEC x = VSET((int)in[k * pair_step + t * token_step]);                                             \
                    for (int v = 0; v < BLOCK; v++)                                                                    \
                        a[t][v] = DOT(a[t][v], x, w[v]);                                                               \
                }                                                                                                      \
            }                                                                                                          \
            for (int t = 0; t < STEP_TOKENS; t++)                                                                      \
                for (int v = 0; v < BLOCK; v++)                                                                        \
                    VSTORE(sums + t * columns + c + WIDTH * v, a[t][v]);                                               \
        }                                                                                                              \
        for (; c < columns; c += WIDTH) {                                                                              \
            VEC a[STEP_TOKENS];                                                                                        \
            for (int t = 0; t < STEP_TOKENS; t++)                                                                      \
                a[t] = VZERO;                                                                                          \
            for (int64_t k = 0; k < pairs; k++) {                                                                      \
                VEC w = VLOAD(matrix + 2 * (k * row + c));                                                             \
                for (int t = 0; t < STEP_TOKENS; t++)                                                                  \
                    a[t] = DOT(a[t], VSET((int)in[k * pair_step + t * token_step]), w);                                \
            }                                                                                                          \
            for (int t = 0; t < STEP_TOKENS; t++)                                                                      \
                VSTORE(sums + t * columns + c, a[t]);                                                                  \
        }                                                                                                              \
    }

PRODUCTS(products, , VDOT)
#else
static void products(const uint32_t *in, int64_t pair_step, int64_t token_step, int64_t pairs, const int16_t *matrix,
                     int64_t row, int64_t columns, int32_t *sums)
{
    memset(sums, 0, sizeof(int32_t) * STEP_TOKENS * (size_t)columns);
    for (int64_t k = 0; k < pairs; k++)
        for (int t = 0; t < STEP_TOKENS; t++) {
            uint32_t both = in[k * pair_step + t * token_step];
            int32_t a = (int16_t)(both & 0xFFFF), b = (int16_t)(both >> 16);
            const int16_t *m = matrix + 2 * k * row;
            for (int64_t c = 0; c < columns; c++)
                sums[t * columns + c] += a * m[2 * c] + b * m[2 * c + 1];
        }
}
#endif

#if defined(__AVX512BW__)
PRODUCTS(products_vnni, __attribute__((target("avx512vnni"))), _mm512_dpwssd_epi32)
#endif

typedef void (*product_kernel)(const uint32_t *, int64_t, int64_t, int64_t, const int16_t *, int64_t, int64_t,
                               int32_t *);

static product_kernel best_products(void)
{
#if defined(__AVX512BW__)
    if (__builtin_cpu_supports("avx512vnni"))
        return products_vnni;
#endif
    return products;
}

/* ---------------------------------------------------------------------------------------------------- encoding */

/* Mean and standard deviation of each channel over the coded tokens, added up token by token; what is not finite
 * counts as 0. mean, deviation: [planes][channels]. */
PDX_API void PDX(klt_stats)(const uint8_t *values, int64_t planes, const int64_t *dims, float *mean, float *deviation)
{
    const geometry *g = (const geometry *)dims;
    const int64_t channels = g->channels, plane_bytes = channels * g->stride * (g->wide ? 4 : 2);
    const float each = 1.0f / (float)g->tokens;
    float x[MAX_CHANNELS];
    for (int64_t p = 0; p < planes; p++, values += plane_bytes, mean += channels, deviation += channels) {
        for (int64_t c = 0; c < channels; c++)
            mean[c] = deviation[c] = 0;
        for (int pass = 0; pass < 2; pass++)
            for (int64_t t = 0; t < g->tokens; t++) {
                load_token(g, values, t, x);
                for (int64_t c = 0; c < channels; c++)
                    x[c] = magnitude(x[c]) < 1e18f ? x[c] : 0.0f;
                if (!pass) {
                    for (int64_t c = 0; c < channels; c++)
                        mean[c] += x[c] * each;
                } else {
                    for (int64_t c = 0; c < channels; c++) {
                        float d = x[c] - mean[c], square = d * d;
                        deviation[c] += square * each;
                    }
                }
            }
    }
}

/* Symbols by mean and step alone: sym[planes][channels][tokens] = 128 + round((x - mean) * inverse). A token of a plane
 * that does not fit ±127 has escaped[planes][tokens] set, and 128 for all its symbols. */
PDX_API void PDX(klt_quantise)(const uint8_t *values, int64_t planes, const int64_t *dims, const float *mean,
                               const float *inverse, uint8_t *sym, uint8_t *escaped)
{
    const geometry *g = (const geometry *)dims;
    const int64_t channels = g->channels, plane_bytes = channels * g->stride * (g->wide ? 4 : 2);
    float x[MAX_CHANNELS];
    uint8_t q[16][MAX_CHANNELS];
    for (int64_t p = 0; p < planes; p++, values += plane_bytes, mean += channels, inverse += channels) {
        for (int64_t from = 0; from < g->tokens; from += 16) {
            const int64_t n = g->tokens - from < 16 ? g->tokens - from : 16;
            for (int64_t t = 0; t < n; t++) {
                uint32_t bad = 0;
                load_token(g, values, from + t, x);
                for (int64_t c = 0; c < channels; c++) {
                    float v = (x[c] - mean[c]) * inverse[c];
                    uint32_t fits = magnitude(v) <= 127.0f;
                    bad |= !fits;
                    q[t][c] = (uint8_t)((int32_t)round_even(fits ? v : 0.0f) + 128);
                }
                escaped[from + t] = (uint8_t)bad;
                if (bad)
                    memset(q[t], 128, (size_t)channels);
            }
            for (int64_t c = 0; c < channels; c++)
                for (int64_t t = 0; t < n; t++)
                    sym[c * g->tokens + from + t] = q[t][c];
        }
        sym += channels * g->tokens;
        escaped += g->tokens;
    }
}

/* Symbols by transform. Per plane p: limits +-8191 on (x - mean) * in_scale, pair matrix forward + p * channels * width
 * of `width` columns, kept[p] of them coded: coefficient v = sum * out_scale, shift = round(8 * mean of v), then
 * sym[sum of kept][tokens] = 128 + round(v - shift / 8), shifts[sum of kept]. angles[tokens][rotary] for the planes with
 * turned[p]. Escapes as in klt_quantise. out_scale: [planes][width]; work: tokens * width floats. */
PDX_API void PDX(klt_forward)(const uint8_t *values, int64_t planes, const int64_t *dims, const float *mean,
                              const float *in_scale, const int16_t *forward, int64_t width, const int64_t *kept,
                              const float *out_scale, const uint8_t *turned, const float *angles, float *work,
                              uint8_t *sym, int16_t *shifts, uint8_t *escaped)
{
    const geometry *g = (const geometry *)dims;
    const int64_t channels = g->channels, plane_bytes = channels * g->stride * (g->wide ? 4 : 2);
    const product_kernel run = best_products();
    float x[MAX_CHANNELS];
    uint32_t in[STEP_TOKENS][MAX_CHANNELS / 2];
    int32_t sums[STEP_TOKENS * MAX_CHANNELS];
    uint8_t q[16][MAX_CHANNELS];
    for (int64_t p = 0; p < planes; p++, values += plane_bytes) {
        const float *m = mean + p * channels, *a = in_scale + p * channels, *out = out_scale + p * width;
        const int16_t *matrix = forward + p * channels * width;
        const int64_t used = kept[p], padded = (used + 15) / 16 * 16;
        float total[MAX_CHANNELS] = {0}, shift[MAX_CHANNELS];
        int64_t good = 0;
        for (int64_t from = 0; from < g->tokens; from += STEP_TOKENS) {
            const int64_t n = g->tokens - from < STEP_TOKENS ? g->tokens - from : STEP_TOKENS;
            memset(in, 0, sizeof in);
            for (int64_t t = 0; t < n; t++) {
                uint32_t wrong = 0;
                int16_t *to = (int16_t *)in[t];
                load_token(g, values, from + t, x);
                if (turned[p])
                    turn(g, angles + (from + t) * g->rotary, -1.0f, x);
                for (int64_t c = 0; c < channels; c++) {
                    float v = (x[c] - m[c]) * a[c];
                    uint32_t fits = magnitude(v) <= 8191.0f;
                    wrong |= !fits;
                    to[c] = (int16_t)(int32_t)round_even(fits ? v : 0.0f);
                }
                escaped[from + t] = (uint8_t)wrong;
            }
            run(in[0], 1, MAX_CHANNELS / 2, channels / 2, matrix, width, padded, sums);
            for (int64_t t = 0; t < n; t++) {
                float *v = work + (from + t) * width;
                for (int64_t k = 0; k < used; k++)
                    v[k] = (float)sums[t * padded + k] * out[k];
                if (escaped[from + t])
                    continue;
                good++;
                for (int64_t k = 0; k < used; k++)
                    total[k] += v[k];
            }
        }
        const float each = 8.0f / (float)(good ? good : 1);
        for (int64_t k = 0; k < used; k++) {
            float eighths = total[k] * each;
            eighths = eighths > 16000.0f ? 16000.0f : eighths < -16000.0f ? -16000.0f : eighths;
            shifts[k] = (int16_t)(int32_t)round_even(eighths);
            shift[k] = (float)shifts[k] * 0.125f;
        }
        for (int64_t from = 0; from < g->tokens; from += 16) {
            const int64_t n = g->tokens - from < 16 ? g->tokens - from : 16;
            for (int64_t t = 0; t < n; t++) {
                const float *v = work + (from + t) * width;
                uint32_t wrong = escaped[from + t];
                for (int64_t k = 0; k < used; k++) {
                    float r = v[k] - shift[k];
                    uint32_t fits = magnitude(r) <= 127.0f;
                    wrong |= !fits;
                    q[t][k] = (uint8_t)((int32_t)round_even(fits ? r : 0.0f) + 128);
                }
                escaped[from + t] = (uint8_t)wrong;
                if (wrong)
                    memset(q[t], 128, (size_t)used);
            }
            for (int64_t k = 0; k < used; k++)
                for (int64_t t = 0; t < n; t++)
                    sym[k * g->tokens + from + t] = q[t][k];
        }
        sym += used * g->tokens;
        shifts += used;
        escaped += g->tokens;
    }
}

/* ---------------------------------------------------------------------------------------------------- decoding */

typedef struct {
    const geometry *g;
    const float *mean, *scale, *angles; /* of this plane; angles NULL: not turned */
    uint8_t *out;
    const uint8_t *sym; /* [rows][pitch] */
    int64_t pitch;
} plane_job;

static void finish(const plane_job *job, int64_t t, float *x)
{
    if (job->angles)
        turn(job->g, job->angles + t * job->g->rotary, 1.0f, x);
    store_token(job->g, job->out, t, x);
}

/* to[t][c] = from[c][t] for 16 tokens and 16 channels. */
static inline void transpose16(const uint8_t *from, int64_t from_pitch, uint8_t *to, int64_t to_pitch)
{
#if defined(__x86_64__)
    __m128i a[16], b[16];
    for (int i = 0; i < 16; i++)
        a[i] = _mm_loadu_si128((const __m128i *)(from + i * from_pitch));
    for (int pass = 0; pass < 4; pass++) {
        for (int i = 0; i < 8; i++) {
            b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + 8]);
            b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + 8]);
        }
        memcpy(a, b, sizeof a);
    }
    for (int i = 0; i < 16; i++)
        _mm_storeu_si128((__m128i *)(to + i * to_pitch), a[i]);
#else
    for (int c = 0; c < 16; c++)
        for (int t = 0; t < 16; t++)
            to[t * to_pitch + c] = from[c * from_pitch + t];
#endif
}

static void by_step(const plane_job *job)
{
    const int64_t channels = job->g->channels;
    uint8_t q[16][MAX_CHANNELS + 16];
    float x[MAX_CHANNELS];
    for (int64_t from = 0; from < job->g->tokens; from += 16) {
        const int64_t n = job->g->tokens - from < 16 ? job->g->tokens - from : 16;
        for (int64_t c = 0; c < channels; c += 16) /* rows and their number are padded: always 16 x 16 */
            transpose16(job->sym + c * job->pitch + from, job->pitch, q[0] + c, MAX_CHANNELS + 16);
        for (int64_t t = 0; t < n; t++) {
            for (int64_t c = 0; c < channels; c++) {
                float scaled = (float)((int32_t)q[t][c] - 128) * job->scale[c];
                x[c] = scaled + job->mean[c];
            }
            finish(job, from + t, x);
        }
    }
}

static void by_matrix(const plane_job *job, int64_t used, const int16_t *shifts, const int16_t *matrix, uint32_t *pairs,
                      product_kernel run)
{
    const int64_t channels = job->g->channels, pitch = job->pitch, count = (used + 1) / 2;
    int32_t sums[STEP_TOKENS * MAX_CHANNELS];
    float x[MAX_CHANNELS], mean[MAX_CHANNELS];
    for (int64_t k = 0; k < count; k++)
        pairs[k] = (uint16_t)shifts[2 * k] | (uint32_t)(2 * k + 1 < used ? (uint16_t)shifts[2 * k + 1] : 0) << 16;
    run(pairs, 1, 0, count, matrix, channels, channels, sums);
    for (int64_t c = 0; c < channels; c++) {
        float eighth = job->scale[c] * 0.125f, moved = (float)sums[c] * eighth;
        mean[c] = moved + job->mean[c];
    }
    for (int64_t k = 0; k < count; k++) {
        const uint8_t *a = job->sym + 2 * k * pitch, *b = 2 * k + 1 < used ? a + pitch : NULL;
        uint32_t *to = pairs + k * pitch;
        for (int64_t t = 0; b && t < pitch; t++)
            to[t] = (uint16_t)((int32_t)a[t] - 128) | (uint32_t)((int32_t)b[t] - 128) << 16;
        for (int64_t t = 0; !b && t < pitch; t++)
            to[t] = (uint16_t)((int32_t)a[t] - 128);
    }
    for (int64_t from = 0; from < job->g->tokens; from += STEP_TOKENS) {
        const int64_t n = job->g->tokens - from < STEP_TOKENS ? job->g->tokens - from : STEP_TOKENS;
        run(pairs + from, pitch, 1, count, matrix, channels, channels, sums);
        for (int64_t t = 0; t < n; t++) {
            for (int64_t c = 0; c < channels; c++) {
                float scaled = (float)sums[t * channels + c] * job->scale[c];
                x[c] = scaled + mean[c];
            }
            finish(job, from + t, x);
        }
    }
}

/* Values of `planes` planes out of one rANS stream. Per plane p: kept[p] rows of symbols, with table[sum of kept]; then
 * x = symbols * scale + mean (inverse and shifts NULL), or x = (symbols + shifts / 8) · (pair matrix
 * inverse[channels / 2][channels][2] of plane p) * scale + mean, with shifts[sum of kept] in +-16000; turned by RoPE
 * where turned[p]. mean, scale: [planes][channels].
 * slots: 4096 entries per table. work: pitch * (channels * 3 + 18) bytes, pitch = tokens rounded up to 64. */
PDX_API int PDX(klt_decode)(const u16a *words, int64_t num_words, const uint16_t *freq, int64_t num_tables,
                            const uint32_t *table, uint32_t *slots, int64_t planes, const int64_t *dims,
                            const int64_t *kept, const int16_t *shifts, const int16_t *inverse, const float *mean,
                            const float *scale, const uint8_t *turned, const float *angles, uint8_t *work, uint8_t *out)
{
    const geometry *g = (const geometry *)dims;
    const int64_t channels = g->channels, plane_bytes = channels * g->stride * (g->wide ? 4 : 2);
    const int64_t pitch = (g->tokens + 63) / 64 * 64;
    const product_kernel run = best_products();
    uint32_t *pairs = (uint32_t *)work;
    uint8_t *sym = work + 4 * pitch * ((channels + 1) / 2);
    rans_reader reader;
    int error = rans_check(freq, num_tables);
    if (!error)
        error = rans_open(&reader, words, num_words);
    for (int64_t t = 0; !error && t < num_tables; t++)
        rans_slots(freq + 256 * t, slots + RANS_PROB * t);
    memset(work, 0, (size_t)(pitch * (channels * 3 + 18)));
    for (int64_t p = 0; p < planes && !error; p++) {
        if (kept[p] < 0 || kept[p] > channels)
            return RANS_BAD_TABLE;
        for (int64_t k = 0; k < kept[p] && !error; k++, table++) {
            if (*table >= (uint64_t)num_tables)
                return RANS_BAD_TABLE;
            error = rans_row(&reader, slots + RANS_PROB * (int64_t)*table, sym + k * pitch, g->tokens);
        }
        if (error)
            break;
        plane_job job = {
            .g = g, .mean = mean + p * channels, .scale = scale + p * channels, .pitch = pitch, .sym = sym,
            .angles = turned[p] ? angles : NULL, .out = out + p * plane_bytes,
        };
        if (inverse)
            by_matrix(&job, kept[p], shifts, inverse + p * channels * channels, pairs, run);
        else
            by_step(&job);
        shifts = shifts ? shifts + kept[p] : shifts;
    }
    return error ? error : rans_close(&reader);
}
