/* Prints the attributes of a call: their names and types are in its schema (name/version:field=code,…), their values in
 * its blob. docs/reference/formats.md has the codes and the tags. */
#ifndef ONNXLINE_ATTRS_H
#define ONNXLINE_ATTRS_H

#include "onnxline_plan.h"

#include <inttypes.h>

static inline void onnxline_print_text(const char *before, onnxline_bytes text) {
    printf("%s%.*s", before, (int)text.size, (const char *)text.data);
}

/* A value of the type `code`; 0 stands for one whose type is a tag before it. `depth` bounds lists in lists. */
static inline void onnxline_print_item(onnxline_reader *in, int code, int depth) {
    switch (code ? code : onnxline_u8(in)) {
    case 'N': printf("none"); break;
    case '?': printf(onnxline_u8(in) ? "true" : "false"); break;
    case 'i': printf("%" PRId64, onnxline_i64(in)); break;
    case 'u': printf("%" PRIu64, onnxline_u64(in)); break; /* an int of 2^63 or more */
    case 'f': printf("%.17g", onnxline_f64(in)); break;
    case 'c': printf("%.17g", onnxline_f64(in)); printf("+%.17gi", onnxline_f64(in)); break;
    case 't': printf("$%" PRIu32, onnxline_u32(in)); break;
    case 'b': printf("body%" PRIu32, onnxline_u32(in)); break;
    case 's': case 'd': case 'l': case 'm': case 'D': case 'o': onnxline_print_text("", onnxline_blob(in)); break;
    case 'I': case 'F': case '[': { /* ints, floats, or values with a tag each */
        uint32_t count = onnxline_u32(in);
        in->failed |= depth == 16;
        printf("[");
        for (uint32_t at = 0; at < count && !in->failed; ++at) {
            if (at) printf(",");
            onnxline_print_item(in, code == 'I' ? 'i' : code == 'F' ? 'f' : 0, depth + 1);
        }
        printf("]");
        break;
    }
    default: in->failed = 1;
    }
}

/* How many bytes stand before one of `stops`. */
static inline uint32_t onnxline_span(onnxline_bytes text, const char *stops) {
    uint32_t size = 0;
    while (size < text.size && !memchr(stops, text.data[size], strlen(stops))) ++size;
    return size;
}

static inline onnxline_bytes onnxline_skip(onnxline_bytes text, uint32_t size) {
    onnxline_bytes rest = {text.data + (size < text.size ? size : text.size), size < text.size ? text.size - size : 0};
    return rest;
}

static inline void onnxline_print_attrs(onnxline_reader *in, onnxline_bytes schema, onnxline_bytes blob) {
    onnxline_reader values = {blob.data, blob.data + blob.size, in->failed, NULL, 0};
    onnxline_bytes rest = onnxline_skip(schema, onnxline_span(schema, ":") + 1);
    while (rest.size && !values.failed) {
        onnxline_bytes name = {rest.data, onnxline_span(rest, "={},")};
        rest = onnxline_skip(rest, name.size);
        if (rest.size > 1 && rest.data[0] == '=' && rest.data[1] == '{') { /* arguments by name, each with a tag */
            rest = onnxline_skip(rest, 2);
            continue;
        }
        int code = 0;
        if (rest.size > 1 && rest.data[0] == '=') {
            code = rest.data[1] == 'n' || rest.data[1] == 'v' ? 0 : rest.data[1];
            if (rest.size > 2 && rest.data[2] == '[') code = code == 'i' ? 'I' : 'F';
            rest = onnxline_skip(rest, onnxline_span(rest, "},"));
        }
        if (name.size) {
            onnxline_print_text(" ", name);
            printf("=");
            onnxline_print_item(&values, code, 0);
        }
        rest = onnxline_skip(rest, rest.size ? 1 : 0); /* the comma or brace */
    }
    in->failed |= values.failed;
}

#endif
