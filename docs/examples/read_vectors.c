/* Golden vectors without Python: the four scale rules, and quantization to MXFP4 with RNE.
 *
 *   gcc -O2 -Wall -Wextra -Werror read_vectors.c -o read_vectors -lm
 *   ./read_vectors spec/vectors/scale.json spec/vectors/rounding.json spec/vectors/quantize.json
 *
 * A record is one line with its keys in a fixed order, so string search is parser enough.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { K = 32 };

static char line[65536]; /* no line is longer */
static const char hex[] = "0123456789abcdef";
static const char *const rules[] = {"floor", "ceil", "rceil", "even"};
static const uint32_t bump_above[] = {0x7FFFFF, 0, 0x400000, 0x5FFFFF}; /* mantissas, in the order of rules */
static const double ties[] = {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0};   /* tie i lies between codes i and i + 1 */

/* The text after `"key":"` in the line, or NULL. */
static const char *text_of(const char *key) {
    char pattern[32];
    snprintf(pattern, sizeof pattern, "\"%s\":\"", key);
    const char *at = strstr(line, pattern);
    return at ? at + strlen(pattern) : NULL;
}

static int rule_of_line(void) {
    const char *name = text_of("rule");
    for (int i = 0; name && i < 4; i++) {
        size_t length = strlen(rules[i]);
        if (!strncmp(name, rules[i], length) && name[length] == '"') return i;
    }
    return -1;
}

/* E8M0 code of a block whose largest magnitude has the finite, non-zero float32 bits `amax`. */
static int scale_code(uint32_t amax, int rule) {
    int code = (int)(amax >> 23) - 2 + ((amax & 0x7FFFFF) > bump_above[rule]);
    return code < 0 ? 0 : code;
}

static int element_code(uint32_t bits, int scale) {
    uint32_t magnitude = bits & 0x7FFFFFFF;
    float x;
    memcpy(&x, &magnitude, sizeof x);
    double v = ldexp(x, 127 - scale); /* exact */
    int code = 0;
    for (int i = 0; i < 7; i++) code += v > ties[i] || (v == ties[i] && i % 2 == 1);
    return code | (int)(bits >> 31) << 3;
}

static int is_byte(const char *text, int byte) { return text[0] == hex[byte >> 4] && text[1] == hex[byte & 15]; }

/* Whether the blocks of words at `x` have the scales and codes of the record. */
static int quantize_agrees(const char *x, const char *scales, const char *codes, int rule) {
    char *end;
    for (; *x != '"'; scales += 2, codes += K) {
        uint32_t block[K], amax = 0;
        for (int i = 0; i < K; i++, x = end) {
            block[i] = (uint32_t)strtoul(x, &end, 16);
            if (end == x) return 0; /* not a whole block */
            if ((block[i] & 0x7FFFFFFF) > amax) amax = block[i] & 0x7FFFFFFF;
        }
        int spoiled = amax >= 0x7F800000;
        int scale = spoiled ? 255 : amax ? scale_code(amax, rule) : 0;
        if (!is_byte(scales, scale)) return 0;
        for (int i = 0; i < K; i++)
            if (codes[i] != hex[spoiled ? 0 : element_code(block[i], scale)]) return 0;
    }
    return *scales == '"' && *codes == '"';
}

static int scale_agrees(const char *amax, const char *scales, int rule) {
    char *end;
    for (; *amax != '"'; amax = end, scales += 2) {
        uint32_t word = (uint32_t)strtoul(amax, &end, 16);
        if (end == amax || !is_byte(scales, scale_code(word, rule))) return 0;
    }
    return *scales == '"';
}

int main(int argc, char **argv) {
    int checked = 0, skipped = 0, wrong = 0;
    for (int file = 1; file < argc; file++) {
        FILE *in = fopen(argv[file], "r");
        if (!in) return perror(argv[file]), 2;
        while (fgets(line, sizeof line, in)) {
            const char *id = text_of("id"), *op = text_of("op"), *scales = text_of("scales");
            const char *x = text_of("rounding\":\"rne\",\"x"); /* no key between: every other choice is the default */
            const char *amax = text_of("amax"), *codes = text_of("codes");
            int rule = rule_of_line(), agrees;
            if (!id) continue; /* the header */
            if (text_of("format")) { skipped++; continue; } /* another block format than MXFP4 */
            if (op && scales && amax && rule >= 0) agrees = scale_agrees(amax, scales, rule);
            else if (op && scales && codes && x && rule >= 0) agrees = quantize_agrees(x, scales, codes, rule);
            else { skipped++; continue; }
            checked++;
            if (!agrees) wrong++, printf("%.*s is wrong\n", (int)strcspn(id, "\""), id);
        }
        fclose(in);
    }
    printf("%d checked, %d wrong, %d skipped: another operation or treatment\n", checked, wrong, skipped);
    return wrong || !checked;
}
