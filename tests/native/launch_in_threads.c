/* Eight threads launch two programs of one descriptor, each with a bias of its own, while others make and free programs.
 *
 * Built with the thread sanitizer, which reports every access that no lock orders; each thread also checks its results.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>

#include "launcher.h"

enum { THREADS = 8, ROUNDS = 200, M = 3, N = 5, K = 4 };

typedef struct Library Library;
Library *library_new(void *, void *, void *, void *, void *, void *, void *);
Descriptor *descriptor_new(const Library *, void *);
void descriptor_release(Descriptor *);
Program *program_new(const Library *, void *, Descriptor *, const int64_t[4][7], const uint64_t[8], size_t, size_t, int,
                     int, int *);

int cublasLtMatmul(void), cublasLtMatmulDescSetAttribute(void *, int, const void *, size_t);
int cublasLtMatmulDescCreate(void **, int, int), cublasLtMatmulDescDestroy(void *), cublasLtMatrixLayoutCreate(void);
int cublasLtMatrixLayoutSetAttribute(void), cublasLtMatrixLayoutDestroy(void), cublasLtMatmulAlgoCheck(void);
long long stand_in_live_descriptors(void), stand_in_live_layouts(void);

/* A is b, N x K in column order; B is a, K x M; D is out, N x M. */
static const int64_t layouts[4][7] = {
    {0, N, K, N, 0, 1, 0}, {0, K, M, K, 0, 1, 0}, {0, N, M, N, 0, 1, 0}, {0, N, M, N, 0, 1, 0}};
static const uint64_t algorithm[8] = {66};

static Library *library;
static Descriptor *descriptor;
static Program *programs[2];

static void *work(void *argument) {
  intptr_t me = (intptr_t)argument;
  float a[M * K], b[K * N], bias[N], out[M * N];
  intptr_t wrong = 0;
  for (int i = 0; i < M * K; i++) a[i] = 1;
  for (int i = 0; i < K * N; i++) b[i] = 1;
  for (int i = 0; i < N; i++) bias[i] = (float)(100 * me + i);
  Arrays arrays = {a, b, out, out, bias, NULL, NULL};
  for (int round = 0; round < ROUNDS; round++) {
    int status;
    Program *own = program_new(library, NULL, descriptor, layouts, algorithm, 0, 0, 0, 1, &status);
    Program *program = round % 3 == 2 ? own : programs[round % 3];
    program_retain(program);
    wrong += program_launch(program, NULL, &arrays, 2, 0, NULL) != 0;
    program_release(program);
    program_release(own);
    for (int i = 0; i < M * N; i++) wrong += out[i] != 2 * K + bias[i % N];
  }
  return (void *)wrong;
}

int main(void) {
  pthread_t threads[THREADS];
  void *pointer, *wrong;
  uint32_t epilogue = 4;
  int status, failures = 0;
  library = library_new((void *)(uintptr_t)cublasLtMatmul, (void *)(uintptr_t)cublasLtMatmulDescSetAttribute,
                        (void *)(uintptr_t)cublasLtMatmulDescDestroy, (void *)(uintptr_t)cublasLtMatrixLayoutCreate,
                        (void *)(uintptr_t)cublasLtMatrixLayoutSetAttribute,
                        (void *)(uintptr_t)cublasLtMatrixLayoutDestroy, (void *)(uintptr_t)cublasLtMatmulAlgoCheck);
  cublasLtMatmulDescCreate(&pointer, 0, 0);
  cublasLtMatmulDescSetAttribute(pointer, 7, &epilogue, sizeof epilogue);
  descriptor = descriptor_new(library, pointer);
  for (int i = 0; i < 2; i++)
    programs[i] = program_new(library, NULL, descriptor, layouts, algorithm, 0, 0, 0, 1, &status);
  for (intptr_t i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, work, (void *)i);
  for (int i = 0; i < THREADS; i++) {
    pthread_join(threads[i], &wrong);
    failures += wrong != NULL;
  }
  for (int i = 0; i < 2; i++) program_release(programs[i]);
  descriptor_release(descriptor);
  failures += stand_in_live_descriptors() != 0 || stand_in_live_layouts() != 0;
  printf("%d failures\n", failures);
  return failures;
}
