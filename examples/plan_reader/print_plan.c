/* Print a plan.bin: cc -std=c99 -o print_plan print_plan.c && ./print_plan runs/NAME/plan.bin */
#include "onnxline_attrs.h"
#include "onnxline_kinds.h"

static const char *ROLES[] = {"input", "param", "state", "const", "tmp", "output"};

static void print_numbers(onnxline_reader *in, const char *before, uint64_t count, int are_vids) {
    printf("%s%s", before, are_vids ? "(" : "[");
    for (uint64_t at = 0; at < count && !in->failed; ++at)
        printf(at ? ",%" PRId64 : "%" PRId64, are_vids ? (int64_t)onnxline_u32(in) : onnxline_i64(in));
    printf(are_vids ? ")" : "]");
}

static void print_sizes(onnxline_reader *in, const char *before) { print_numbers(in, before, onnxline_u32(in), 0); }
static void print_vids(onnxline_reader *in, const char *before) { print_numbers(in, before, onnxline_u32(in), 1); }

static void print_value(onnxline_reader *in, uint32_t vid) {
    printf("value %" PRIu32, vid);
    onnxline_print_text(" ", onnxline_text(in));
    uint8_t role = onnxline_u8(in);
    printf(" %s", role < 6 ? ROLES[role] : "?");
    onnxline_print_text(" ", onnxline_text(in)); /* the dtype */
    onnxline_text(in);                           /* the device */
    print_sizes(in, "");
    if (onnxline_has(in)) print_sizes(in, " traced");
    if (onnxline_has(in)) { print_sizes(in, " strides"); printf(" from %" PRId64, onnxline_i64(in)); }
    if (onnxline_has(in)) printf(" alias of %" PRIu32, onnxline_u32(in));
    if (onnxline_has(in)) printf(" at byte %" PRIu64, onnxline_u64(in));
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
    print_vids(in, "inputs");
    print_vids(in, " outputs");
    print_numbers(in, " updates", 2 * (uint64_t)onnxline_u32(in), 1); /* pairs */
    print_vids(in, " fed");
    printf("\n");
    for (uint32_t left = onnxline_u32(in); left && !in->failed; --left) {
        print_call(in);
        for (uint32_t bodies = onnxline_u32(in); bodies && !in->failed; --bodies) print_plan(in, depth + 1);
    }
    onnxline_skip_memory(in);
}

int main(int count, char **arguments) {
    onnxline_reader in = {NULL, NULL, 0, NULL, 0};
    size_t size = 0;
    uint8_t *data = count == 2 ? onnxline_load(arguments[1], &size) : NULL;
    const char *wrong = data ? onnxline_open(&in, data, size) : "expected the path of a plan.bin";
    for (uint32_t left = wrong ? 0 : onnxline_u32(&in); left && !in.failed; --left) {
        onnxline_print_text("entry ", onnxline_text(&in));
        printf(": ");
        print_plan(&in, 0);
    }
    for (uint32_t left = wrong ? 0 : onnxline_u32(&in); left && !in.failed; --left) {
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
