/* The bare limits: the speed of a C program that moves the bytes of one step, without TensorFlow and starwire.
 *   bare tcp|unix COUNT SIZE SECONDS   per step: COUNT messages of SIZE bytes "pulled", then the same "pushed" back; every message has its own buffer
 *   bare tcp+math|unix+math …      the same, with the arithmetic of the training step: gradient = pulled * rate, variable -= gradient
 *   bare memcpy   COUNT SIZE SECONDS   copies COUNT buffers of SIZE bytes to COUNT others
 * Prints one line of JSON. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec; }
static void die(const char *what) { perror(what); exit(1); }
static int compare(const void *a, const void *b) { double x = *(const double *)a, y = *(const double *)b; return (x > y) - (x < y); }

static void multiply(char *to, const char *from, size_t size) {
  float *out = (float *)to;
  const float *in = (const float *)from;
  for (size_t i = 0; i < size / sizeof *in; ++i) out[i] = in[i] * 0x1p-14f;
}

static void subtract(char *from, const char *what, size_t size) {
  float *value = (float *)from;
  const float *gradient = (const float *)what;
  for (size_t i = 0; i < size / sizeof *value; ++i) value[i] -= gradient[i];
}

static char **buffers(size_t count, size_t size) {
  char **all = malloc(count * sizeof *all);
  if (!all) die("malloc");
  for (size_t i = 0; i < count; ++i) {
    if (posix_memalign((void **)&all[i], 64, size)) die("posix_memalign");
    /* Normal numbers: arithmetic on subnormals would be slow. */
    for (size_t j = 0; j < size / sizeof(float); ++j) ((float *)all[i])[j] = (float)(1 + (i + j) % 64);
  }
  return all;
}

/* Up to 64 messages per sendmsg/recvmsg: starwire may coalesce, so may this program. */
static void move(int fd, char **bufs, size_t count, size_t size, int out) {
  for (size_t first = 0; first < count; first += 64) {
    size_t n = count - first < 64 ? count - first : 64, skip = 0;
    struct iovec iov[64];
    for (size_t i = 0; i < n; ++i) iov[i] = (struct iovec){bufs[first + i], size};
    while (skip < n) {
      struct msghdr msg = {.msg_iov = iov + skip, .msg_iovlen = n - skip};
      ssize_t done = out ? sendmsg(fd, &msg, MSG_NOSIGNAL) : recvmsg(fd, &msg, MSG_WAITALL);
      if (done <= 0) { if (out || done < 0) die("socket"); exit(0); }
      while (skip < n && (size_t)done >= iov[skip].iov_len) done -= (ssize_t)iov[skip++].iov_len;
      if (skip < n) { iov[skip].iov_base = (char *)iov[skip].iov_base + done; iov[skip].iov_len -= (size_t)done; }
    }
  }
}

static void sockets(int tcp, int pair[2]) {
  if (!tcp) { if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) die("socketpair"); return; }
  int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
  struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t len = sizeof addr;
  if (listener < 0 || bind(listener, (struct sockaddr *)&addr, len) || listen(listener, 1) || getsockname(listener, (struct sockaddr *)&addr, &len)) die("listen");
  pair[0] = socket(AF_INET, SOCK_STREAM, 0);
  if (pair[0] < 0 || connect(pair[0], (struct sockaddr *)&addr, len)) die("connect");
  pair[1] = accept(listener, NULL, NULL);
  if (pair[1] < 0) die("accept");
  close(listener);
  for (int i = 0; i < 2; ++i) setsockopt(pair[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

int main(int argc, char **argv) {
  if (argc != 5) { fprintf(stderr, "usage: bare tcp|unix|tcp+math|unix+math|memcpy COUNT SIZE SECONDS\n"); return 2; }
  size_t count = strtoull(argv[2], NULL, 10), size = strtoull(argv[3], NULL, 10), steps = 0, room = 1 << 20;
  double seconds = strtod(argv[4], NULL), *took = malloc(room * sizeof *took), start;
  if (!count || !size || !took) return 2;
  char **a = buffers(count, size);
  if (!strcmp(argv[1], "memcpy")) {
    char **b = buffers(count, size);
    for (start = now(); now() - start < seconds; ++steps)
      for (size_t i = 0; i < count; ++i) {
        memcpy(b[i], a[i], size);
        __asm__ volatile("" ::"r"(b[i]) : "memory"); /* keeps the copy from being optimised away */
      }
    printf("{\"bytes_per_s\": %.0f}\n", (double)steps * (double)count * (double)size / (now() - start));
    return 0;
  }
  int pair[2];
  int math = strstr(argv[1], "+math") != NULL;
  sockets(!strncmp(argv[1], "tcp", 3), pair);
  char **other = math ? buffers(count, size) : a;
  /* With arithmetic, a message is processed while the next is in flight. */
  size_t batch = math ? 1 : count;
  pid_t child = fork();
  if (child < 0) die("fork");
  if (!child) { /* the parameter server */
    close(pair[0]);
    char go;
    while (recv(pair[1], &go, 1, MSG_WAITALL) == 1) {
      move(pair[1], a, count, size, 1);
      for (size_t i = 0; i < count; i += batch) {
        move(pair[1], other + i, batch, size, 0);
        if (math) subtract(a[i], other[i], size);
      }
    }
    _exit(0);
  }
  close(pair[1]);
  char **mine = buffers(count, size);
  double warm_until = now() + seconds / 5, begin = 0, last = now();
  for (;;) {
    char go = 1;
    if (send(pair[0], &go, 1, MSG_NOSIGNAL) != 1) die("send");
    for (size_t i = 0; i < count; i += batch) {
      move(pair[0], mine + i, batch, size, 0);
      if (math) multiply(other[i], mine[i], size);
    }
    move(pair[0], math ? other : mine, count, size, 1);
    double t = now();
    if (!begin) { if (t >= warm_until) begin = t; last = t; continue; }
    if (steps < room) took[steps] = t - last;
    ++steps; last = t;
    if (t - begin >= seconds) break;
  }
  double elapsed = last - begin;
  close(pair[0]);
  waitpid(child, NULL, 0);
  size_t kept = steps < room ? steps : room;
  qsort(took, kept, sizeof *took, compare);
  printf("{\"bytes_per_s\": %.0f, \"steps_per_s\": %.3f, \"p50_s\": %.9f, \"p99_s\": %.9f}\n", 2.0 * (double)steps * (double)count * (double)size / elapsed,
         (double)steps / elapsed, took[kept / 2], took[(size_t)((double)(kept - 1) * 0.99)]);
  return 0;
}
