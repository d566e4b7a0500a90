/* Print a plan.bin: cc -std=c99 -o print_plan print_plan.c && ./print_plan runs/NAME/plan.bin */
#include "onnxline_plan.h"

#include <inttypes.h>
#include <stdio.h>

static const char *ROLES[] = {"input", "param", "state", "const", "tmp", "output"};

static void print_text(onnxline_bytes text) { printf("%.*s", (int)text.size, (const char *)text.data); }

static void print_i64s(onnxline_reader *in, uint32_t count) {
    printf("[");
    for (uint32_t at = 0; at < count && !in->failed; ++at) printf(at ? ",%" PRId64 : "%" PRId64, onnxline_i64(in));
    printf("]");
}

static uint32_t print_vids(onnxline_reader *in, const char *what) {
    uint32_t count = onnxline_u32(in);
    printf("%s(", what);
    for (uint32_t at = 0; at < count && !in->failed; ++at) printf(at ? ",%" PRIu32 : "%" PRIu32, onnxline_u32(in));
    printf(")");
    return count;
}

/* A value that says its type by a tag: an argument of a torch operator, or a constraint. */
static void print_item(onnxline_reader *in, int depth) {
    uint8_t tag = onnxline_u8(in);
    switch (tag) {
    case 'N': printf("none"); break;
    case '?': printf(onnxline_u8(in) ? "true" : "false"); break;
    case 'i': printf("%" PRId64, onnxline_i64(in)); break;
    case 'f': printf("%.17g", onnxline_f64(in)); break;
    case 'c': printf("%.17g", onnxline_f64(in)); printf("+%.17gi", onnxline_f64(in)); break;
    case 's': case 'd': case 'l': case 'm': case 'D': case 'o': print_text(onnxline_blob(in)); break;
    case 't': printf("$%" PRIu32, onnxline_u32(in)); break;
    case 'b': printf("body%" PRIu32, onnxline_u32(in)); break;
    case '[':
        printf("[");
        uint32_t count = onnxline_u32(in);
        if (depth == 16) in->failed = 1;
        for (uint32_t at = 0; at < count && !in->failed; ++at) { if (at) printf(","); print_item(in, depth + 1); }
        printf("]");
        break;
    default: in->failed = 1;
    }
}

static void print_field(onnxline_reader *in, const char *code) {
    if (code[1] == '[') {
        uint32_t count = onnxline_u32(in);
        if (code[0] == 'i') { print_i64s(in, count); return; }
        printf("[");
        for (uint32_t at = 0; at < count && !in->failed; ++at) printf(at ? ",%.17g" : "%.17g", onnxline_f64(in));
        printf("]");
    } else switch (code[0]) {
        case '?': printf(onnxline_u8(in) ? "true" : "false"); break;
        case 'i': printf("%" PRId64, onnxline_i64(in)); break;
        case 'f': printf("%.17g", onnxline_f64(in)); break;
        case 's': print_text(onnxline_blob(in)); break;
        default: print_item(in, 0); /* v, and n, whose tags are among those of v */
    }
}

/* The attributes of a call: names are in the schema (name/version:field=code,field={name,name}), values in the blob. */
static void print_attrs(onnxline_reader *in, onnxline_bytes schema) {
    onnxline_bytes blob = onnxline_blob(in);
    onnxline_reader fields = {blob.data, blob.data + blob.size, in->failed, NULL, 0, 0, 0};
    char *text = calloc(schema.size + 2, 1);
    if (!text) { in->failed = 1; return; }
    memcpy(text, schema.data, schema.size);
    char *at = strchr(text, ':');
    while (at && *++at && !fields.failed) {
        char *equals = strchr(at, '=');
        if (!equals) { fields.failed = 1; break; }
        if (equals[1] == '{') {
            for (char *name = equals + 2; *name && *name != '}' && !fields.failed;) {
                size_t length = strcspn(name, ",}");
                printf(" %.*s=", (int)length, name);
                print_item(&fields, 0);
                name += length + (name[length] == ',');
            }
            at = strchr(equals, '}');
            at = at ? strchr(at, ',') : NULL;
        } else {
            printf(" %.*s=", (int)(equals - at), at);
            print_field(&fields, equals + 1);
            at = strchr(equals, ',');
        }
    }
    in->failed |= fields.failed;
    free(text);
}

static void print_value(onnxline_reader *in, uint32_t vid) {
    onnxline_bytes name = onnxline_text(in), dtype = onnxline_text(in);
    onnxline_text(in); /* the device */
    uint8_t role = onnxline_u8(in), storage = onnxline_u8(in), flags = onnxline_u8(in), rank = onnxline_u8(in);
    printf("value %" PRIu32 " ", vid);
    print_text(name);
    printf(" %s ", role < 6 ? ROLES[role] : "?");
    print_text(dtype);
    print_i64s(in, rank);
    if (flags & ONNXLINE_HAS_STRIDES) { printf(" traced"); print_i64s(in, rank); }
    if (flags & ONNXLINE_HAS_LAYOUT) { printf(" strides"); print_i64s(in, rank); printf(" from %" PRId64, onnxline_i64(in)); }
    if (storage == ONNXLINE_ALIAS) printf(" alias of %" PRIu64, onnxline_u64(in));
    if (storage == ONNXLINE_ARENA) printf(" at byte %" PRIu64, onnxline_u64(in));
    printf("\n");
}

static void print_plan(onnxline_reader *in, int depth);

static void print_call(onnxline_reader *in, int depth) {
    uint32_t op = onnxline_u32(in), kind = onnxline_u32(in);
    onnxline_bytes schema = onnxline_text(in);
    printf("call of op %" PRIu32 " kind %" PRIu32 " ", op, kind);
    print_text(schema);
    print_attrs(in, schema);
    print_vids(in, " ");
    print_vids(in, " -> ");
    for (uint32_t left = onnxline_u32(in); left && !in->failed; --left) {
        printf(" ");
        print_text(onnxline_text(in));
        printf(":");
        print_item(in, 0);
    }
    printf("\n");
    for (uint32_t left = onnxline_u32(in); left && !in->failed; --left) print_plan(in, depth + 1);
}

static void print_plan(onnxline_reader *in, int depth) {
    if (depth > 64) { in->failed = 1; return; }
    printf("graph \"");
    print_text(onnxline_text(in));
    printf("\" ");
    print_text(onnxline_text(in)); /* the digest */
    printf(" arena %" PRIu64, onnxline_u64(in));
    printf(" live %" PRIu64 "\n", onnxline_u64(in));
    uint32_t values = onnxline_u32(in);
    for (uint32_t vid = 0; vid < values && !in->failed; ++vid) print_value(in, vid);
    print_vids(in, "inputs");
    print_vids(in, " outputs");
    print_vids(in, " updates");
    print_vids(in, " fed");
    printf("\n");
    for (uint32_t left = onnxline_u32(in); left && !in->failed; --left) print_call(in, depth);
    uint32_t regions = onnxline_u32(in);
    if (!regions) return;
    for (uint32_t at = 0; at < regions && !in->failed; ++at) {
        printf("region %" PRIu32 " ", at);
        print_text(onnxline_text(in));
        printf(" %" PRIu64 "\n", onnxline_u64(in));
    }
    print_vids(in, "pins");
    printf("\n");
    for (uint32_t left = onnxline_u32(in); left && !in->failed; --left) {
        uint32_t root = onnxline_u32(in), region = onnxline_u32(in);
        uint64_t offset = onnxline_u64(in);
        uint32_t first = onnxline_u32(in), last = onnxline_u32(in);
        printf("%" PRIu32 " in region %" PRIu32 " at byte %" PRIu64 ", calls %" PRIu32 " to %" PRIu32 "\n", root, region, offset, first, last);
    }
}

int main(int count, char **arguments) {
    FILE *file = count == 2 ? fopen(arguments[1], "rb") : NULL;
    if (!file) { fprintf(stderr, "expected the path of a plan.bin\n"); return 2; }
    fseek(file, 0, SEEK_END);
    size_t size = (size_t)ftell(file);
    rewind(file);
    uint8_t *data = malloc(size + 1);
    size_t got = data ? fread(data, 1, size, file) : 0;
    fclose(file);
    onnxline_reader in = {NULL, NULL, 0, NULL, 0, 0, 0};
    const char *wrong = got == size && data ? onnxline_open(&in, data, size) : "the file cannot be read";
    for (uint32_t left = wrong ? 0 : in.entry_count; left && !in.failed; --left) {
        printf("entry ");
        print_text(onnxline_text(&in));
        printf(": ");
        print_plan(&in, 0);
    }
    for (uint32_t left = wrong ? 0 : in.weight_count; left && !in.failed; --left) {
        onnxline_bytes name = onnxline_text(&in), path = onnxline_text(&in);
        uint64_t offset = onnxline_u64(&in), bytes = onnxline_u64(&in);
        onnxline_bytes here = onnxline_blob(&in);
        printf("weight ");
        print_text(name);
        if (path.size) { printf(" in "); print_text(path); printf(" from %" PRIu64 ", %" PRIu64 " bytes\n", offset, bytes); }
        else printf(" here, %" PRIu32 " bytes\n", here.size);
    }
    if (!wrong && (in.failed || in.at != in.end)) wrong = "a field has no meaning";
    if (wrong) fprintf(stderr, "%s\n", wrong);
    free(in.texts);
    free(data);
    return wrong != NULL;
}
