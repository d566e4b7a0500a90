/* A shared object with a kernel for onnxruntime: `com.acme::SwishBeta`, x · sigmoid(beta · x) of float32.

       cc -shared -fPIC -O2 -o libswish.so custom_ops_kernel.c -lm

   onnxruntime's wheel has no headers. What is needed of onnxruntime_c_api.h is declared here: its functions are a table
   that only grows at its end, so a function keeps its place in all releases, and so do the fields of OrtCustomOp. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

typedef void *Status;
typedef const void *const *Api;
typedef struct {
  Api (*get_api)(uint32_t version);
  const char *(*get_version)(void);
} ApiBase;

enum { VERSION = 8, FLOAT = 1, REQUIRED = 0 };

#define CREATE_CUSTOM_OP_DOMAIN ((Status(*)(const char *, void **))api[26])
#define CUSTOM_OP_DOMAIN_ADD ((Status(*)(void *, const void *))api[27])
#define ADD_CUSTOM_OP_DOMAIN ((Status(*)(void *, void *))api[28])
#define GET_TENSOR_MUTABLE_DATA ((Status(*)(const void *, void **))api[51])
#define GET_DIMENSIONS_COUNT ((Status(*)(const void *, size_t *))api[61])
#define GET_DIMENSIONS ((Status(*)(const void *, int64_t *, size_t))api[62])
#define GET_ELEMENT_COUNT ((Status(*)(const void *, size_t *))api[64])
#define GET_TYPE_AND_SHAPE ((Status(*)(const void *, void **))api[65])
#define GET_ATTRIBUTE_FLOAT ((Status(*)(const void *, const char *, float *))api[85])
#define GET_INPUT ((Status(*)(const void *, size_t, const void **))api[90])
#define GET_OUTPUT ((Status(*)(void *, size_t, const int64_t *, size_t, void **))api[91])
#define RELEASE_STATUS ((void (*)(Status))api[93])
#define RELEASE_TYPE_AND_SHAPE ((void (*)(void *))api[99])

typedef struct {
  Api api;
  float beta;
} Kernel;

static void *create_kernel(const void *op, Api api, const void *info) {
  Kernel *kernel = malloc(sizeof *kernel);
  kernel->api = api;
  Status missing = GET_ATTRIBUTE_FLOAT(info, "beta", &kernel->beta);
  if (missing) {
    RELEASE_STATUS(missing);
    kernel->beta = 1.0f;
  }
  return kernel;
}

static void compute(void *own, void *context) {
  const Kernel *kernel = own;
  Api api = kernel->api;
  const void *input;
  void *output, *shape, *x, *y;
  size_t rank, count;
  int64_t dims[8];
  GET_INPUT(context, 0, &input);
  GET_TYPE_AND_SHAPE(input, &shape);
  GET_DIMENSIONS_COUNT(shape, &rank);
  if (rank > 8) abort();
  GET_DIMENSIONS(shape, dims, rank);
  GET_ELEMENT_COUNT(shape, &count);
  RELEASE_TYPE_AND_SHAPE(shape);
  GET_OUTPUT(context, 0, dims, rank, &output);
  GET_TENSOR_MUTABLE_DATA(input, &x);
  GET_TENSOR_MUTABLE_DATA(output, &y);
  for (size_t at = 0; at < count; at++) {
    const double value = ((const float *)x)[at];
    ((float *)y)[at] = (float)(value / (1 + exp(-(double)kernel->beta * value)));
  }
}

static const char *name(const void *op) { return "SwishBeta"; }
static const char *provider(const void *op) { return NULL; }
static int type(const void *op, size_t place) { return FLOAT; }
static size_t one(const void *op) { return 1; }
static int characteristic(const void *op, size_t place) { return REQUIRED; }

static const struct {
  uint32_t version;
  void *(*create)(const void *, Api, const void *);
  const char *(*name)(const void *);
  const char *(*provider)(const void *);
  int (*input_type)(const void *, size_t);
  size_t (*inputs)(const void *);
  int (*output_type)(const void *, size_t);
  size_t (*outputs)(const void *);
  void (*compute)(void *, void *);
  void (*destroy)(void *);
  int (*input_characteristic)(const void *, size_t);
  int (*output_characteristic)(const void *, size_t);
  void *later[12];
} OP = {VERSION, create_kernel, name, provider, type, one, type, one, compute, free, characteristic, characteristic, {0}};

Status RegisterCustomOps(void *options, const ApiBase *base) {
  Api api = base->get_api(VERSION);
  void *domain;
  Status failed = CREATE_CUSTOM_OP_DOMAIN("com.acme", &domain);
  if (!failed) failed = CUSTOM_OP_DOMAIN_ADD(domain, &OP);
  return failed ? failed : ADD_CUSTOM_OP_DOMAIN(options, domain);
}
