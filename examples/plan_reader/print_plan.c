/* Print a plan.bin: cc -std=c99 -o print_plan print_plan.c && ./print_plan runs/NAME/plan.bin */
#include "onnxline_attrs.h"
#include "onnxline_kinds.h"

static const char *ROLES[] = {"input", "param", "state", "const", "tmp", "output"};

static void print_numbers(onnxline_reader *in, const char *before, uint32_t count, int are_vids) {
    printf("%s%s", before, are_vids ? "(" : "[");
    for (uint32_t at = 0; at < count && !in->failed; ++at)
        printf(at ? ",%" PRId64 : "%" PRId64, are_vids ? (int64_t)onnxline_u32(in) : onnxline_i64(in));
    printf(are_vids ? ")" : "]");
}

static void print_vids(onnxline_reader *in, const char *before) { print_numbers(in, before, onnxline_u32(in), 1); }

static void print_value(onnxline_reader *in, uint32_t vid) {
    onnxline_bytes name = onnxline_text(in), dtype = onnxline_text(in);
    onnxline_text(in); /* the device */
    uint8_t role = onnxline_u8(in), storage = onnxline_u8(in), flags = onnxline_u8(in), rank = onnxline_u8(in);
    printf("value %" PRIu32, vid);
    onnxline_print_text(" ", name);
    printf(" %s", role < 6 ? ROLES[role] : "?");
    onnxline_print_text(" ", dtype);
    print_numbers(in, "", rank, 0);
    if (flags & ONNXLINE_HAS_STRIDES) print_numbers(in, " traced", rank, 0);
    if (flags & ONNXLINE_HAS_LAYOUT) { print_numbers(in, " strides", rank, 0); printf(" from %" PRId64, onnxline_i64(in)); }
    if (storage == ONNXLINE_ALIAS) printf(" alias of %" PRIu64, onnxline_u64(in));
    if (storage == ONNXLINE_ARENA) printf(" at byte %" PRIu64, onnxline_u64(in));
    printf("\n");
}

/* All that a runtime needs to launch a kernel; put yours here. ins and outs are readers that stand at lists of vids. */
static int op_call(uint32_t kind_id, onnxline_reader ins, onnxline_reader outs, onnxline_bytes schema, onnxline_bytes blob) {
    printf(" kind %" PRIu32, kind_id);
    onnxline_print_text(" ", schema);
    onnxline_print_attrs(&ins, schema, blob);
    print_vids(&ins, " ");
    print_vids(&outs, " -> ");
    return ins.failed | outs.failed;
}

static void print_call(onnxline_reader *in) { /* its bodies follow */
    printf("call of op %" PRIu32, onnxline_u32(in));
    uint32_t kind_id = onnxline_u32(in);
    printf(" %s", onnxline_kind_name(kind_id));
    onnxline_bytes schema = onnxline_text(in), blob = onnxline_blob(in);
    onnxline_reader ins = onnxline_list(in), outs = onnxline_list(in);
    in->failed |= op_call(kind_id, ins, outs, schema, blob);
    for (uint32_t left = onnxline_u32(in); left && !in->failed; --left) { /* constraints */
        onnxline_print_text(" ", onnxline_text(in));
        printf(":");
        onnxline_print_item(in, 0, 0);
    }
    printf("\n");
}

static void print_plan(onnxline_reader *in, int depth) {
    in->failed |= depth > 64;
    onnxline_print_text("graph \"", onnxline_text(in));
    onnxline_print_text("\" ", onnxline_text(in)); /* the digest */
    printf(" arena %" PRIu64, onnxline_u64(in));
    printf(" live %" PRIu64 "\n", onnxline_u64(in));
    for (uint32_t vid = 0, count = onnxline_u32(in); vid < count && !in->failed; ++vid) print_value(in, vid);
    const char *lists[] = {"inputs", " outputs", " updates", " fed"};
    for (int at = 0; at < 4; ++at) print_vids(in, lists[at]);
    printf("\n");
    for (uint32_t left = onnxline_u32(in); left && !in->failed; --left) {
        print_call(in);
        for (uint32_t bodies = onnxline_u32(in); bodies && !in->failed; --bodies) print_plan(in, depth + 1);
    }
    onnxline_skip_memory(in);
}

int main(int count, char **arguments) {
    onnxline_reader in = {NULL, NULL, 0, NULL, 0, 0, 0};
    size_t size = 0;
    uint8_t *data = count == 2 ? onnxline_load(arguments[1], &size) : NULL;
    const char *wrong = data ? onnxline_open(&in, data, size) : "expected the path of a plan.bin";
    for (uint32_t left = wrong ? 0 : in.entry_count; left && !in.failed; --left) {
        onnxline_print_text("entry ", onnxline_text(&in));
        printf(": ");
        print_plan(&in, 0);
    }
    for (uint32_t left = wrong ? 0 : in.weight_count; left && !in.failed; --left) {
        onnxline_print_text("weight ", onnxline_text(&in));
        onnxline_print_text(" in '", onnxline_text(&in));
        printf("' from %" PRIu64, onnxline_u64(&in));
        printf(", %" PRIu64 " bytes", onnxline_u64(&in));
        printf(", crc32 %08" PRIx32, onnxline_u32(&in));
        printf(", %" PRIu32 " bytes here\n", onnxline_blob(&in).size);
    }
    if (!wrong && (in.failed || in.at != in.end)) wrong = "a field has no meaning";
    if (wrong) fprintf(stderr, "%s\n", wrong);
    free(in.texts);
    free(data);
    return wrong != NULL;
}
