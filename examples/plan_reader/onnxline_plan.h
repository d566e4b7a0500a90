/* Reads plan.bin of onnxline, version 3. docs/reference/plan-format.md describes every field.
 *
 * All numbers are little-endian. A reader that would go beyond the end sets `failed`, and gives zeros from then on, so
 * it is enough to ask once at the end. The names of kinds are in onnxline_kinds.h; a number never changes. */
#ifndef ONNXLINE_PLAN_H
#define ONNXLINE_PLAN_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ONNXLINE_PLAN_MAGIC "ONNXLPLN"
#define ONNXLINE_PLAN_VERSION 3u
#define ONNXLINE_PLAN_HEADER 64u
#define ONNXLINE_CHECKED_FROM 16u  /* first byte that the checksum covers */

enum onnxline_role { ONNXLINE_INPUT, ONNXLINE_PARAM, ONNXLINE_STATE, ONNXLINE_CONST, ONNXLINE_TMP, ONNXLINE_OUTPUT };

typedef struct {
    const uint8_t *data;
    uint32_t size;
} onnxline_bytes; /* a text (UTF-8, without a zero at its end) or a blob; it points into the file */

typedef struct {
    const uint8_t *at, *end;
    int failed;
    onnxline_bytes *texts;
    uint32_t text_count;
} onnxline_reader;

static inline uint64_t onnxline_take(onnxline_reader *reader, size_t bytes) {
    uint64_t number = 0;
    if (reader->failed || (size_t)(reader->end - reader->at) < bytes) {
        reader->failed = 1;
        return 0;
    }
    for (size_t at = 0; at < bytes; ++at) number |= (uint64_t)reader->at[at] << (8 * at);
    reader->at += bytes;
    return number;
}

static inline uint8_t onnxline_u8(onnxline_reader *reader) { return (uint8_t)onnxline_take(reader, 1); }
static inline uint32_t onnxline_u32(onnxline_reader *reader) { return (uint32_t)onnxline_take(reader, 4); }
static inline uint64_t onnxline_u64(onnxline_reader *reader) { return onnxline_take(reader, 8); }
static inline int64_t onnxline_i64(onnxline_reader *reader) { return (int64_t)onnxline_take(reader, 8); }

/* A reader that stands at the list of u32 where `reader` stands, which goes past it. */
static inline onnxline_reader onnxline_list(onnxline_reader *reader) {
    onnxline_reader list = *reader;
    for (uint32_t left = onnxline_u32(reader); left && !reader->failed; --left) onnxline_u32(reader);
    return list;
}

static inline double onnxline_f64(onnxline_reader *reader) {
    uint64_t bits = onnxline_take(reader, 8);
    double number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline onnxline_bytes onnxline_blob(onnxline_reader *reader) {
    onnxline_bytes blob = {reader->at, onnxline_u32(reader)};
    if (reader->failed || (size_t)(reader->end - reader->at) < blob.size) {
        reader->failed = 1;
        blob.size = 0;
        return blob;
    }
    blob.data = reader->at;
    reader->at += blob.size;
    return blob;
}

static inline onnxline_bytes onnxline_text(onnxline_reader *reader) {
    uint32_t index = onnxline_u32(reader);
    onnxline_bytes none = {reader->at, 0};
    if (index < reader->text_count) return reader->texts[index];
    reader->failed = 1;
    return none;
}

static inline uint32_t onnxline_crc32(const uint8_t *data, size_t size) { /* as zlib's */
    uint32_t sum = ~0u;
    for (size_t at = 0; at < size; ++at) {
        sum ^= data[at];
        for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ (0xEDB88320u & (0u - (sum & 1u)));
    }
    return ~sum;
}

/* Check the header and read the table of texts; NULL, or what is wrong. Free reader->texts in the end. */
static inline const char *onnxline_open(onnxline_reader *reader, const uint8_t *data, size_t size) {
    onnxline_reader fresh = {data + (size < 8 ? size : 8), data + size, 0, NULL, 0};
    *reader = fresh;
    if (size < ONNXLINE_PLAN_HEADER || memcmp(data, ONNXLINE_PLAN_MAGIC, 8)) return "this is no plan.bin";
    if (onnxline_u32(reader) != ONNXLINE_PLAN_VERSION) return "another version of plan.bin";
    uint32_t checksum = onnxline_u32(reader);
    if (onnxline_u64(reader) != size) return "the file was cut";
    if (onnxline_crc32(data + ONNXLINE_CHECKED_FROM, size - ONNXLINE_CHECKED_FROM) != checksum) return "the file was changed";
    uint32_t count = onnxline_u32(reader);
    reader->at = data + ONNXLINE_PLAN_HEADER;
    if (count > size / 4) return "the file has fewer texts than it says"; /* a text takes 4 bytes at least */
    reader->texts = (onnxline_bytes *)calloc(count ? count : 1, sizeof *reader->texts);
    if (!reader->texts) return "there is no memory for the texts";
    for (uint32_t at = 0; at < count; ++at) reader->texts[at] = onnxline_blob(reader);
    reader->text_count = count;
    return reader->failed ? "the table of texts is cut" : NULL;
}

/* Whether the field is there that may be missing. */
static inline int onnxline_has(onnxline_reader *reader) { return onnxline_u8(reader) == 1; }

/* Pass over the memory map after the calls of a plan: regions, who lies where from which call to which, and pins. */
static inline void onnxline_skip_memory(onnxline_reader *reader) {
    if (!onnxline_has(reader)) return;
    for (uint32_t left = onnxline_u32(reader); left && !reader->failed; --left) {
        onnxline_text(reader);
        if (onnxline_has(reader)) onnxline_u64(reader);
    }
    for (uint32_t left = onnxline_u32(reader); left && !reader->failed; --left)
        for (int field = 0; field < 6; ++field) onnxline_u32(reader); /* vid, region, an offset of two, first and last call */
    for (uint32_t left = onnxline_u32(reader); left && !reader->failed; --left) onnxline_u64(reader); /* vid, region */
}

/* A whole file; NULL where it cannot be read. Free it in the end. */
static inline uint8_t *onnxline_load(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    if (!file) return NULL;
    long end = fseek(file, 0, SEEK_END) ? -1 : ftell(file);
    rewind(file);
    uint8_t *data = end < 0 || end == LONG_MAX ? NULL : (uint8_t *)malloc((size_t)end + 1); /* LONG_MAX: a folder */
    *size = data ? fread(data, 1, (size_t)end, file) : 0;
    fclose(file);
    return data;
}

#endif
