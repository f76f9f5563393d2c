/* The bare limits: the speed of a C program that moves the bytes of one step, without TensorFlow and starwire.
 *   bare tcp|unix COUNT SIZE SECONDS   per step: COUNT messages of SIZE bytes "pulled", then the same "pushed" back; every message has its own buffer
 *   bare tcp+math|unix+math …      the same, with the arithmetic of the training step: gradient = pulled * rate, variable -= gradient
 *   bare memcpy   COUNT SIZE SECONDS   copies COUNT buffers of SIZE bytes to COUNT others
 *   bare wire|wire+overlap COUNT PULL SECONDS PUSH ADDRESS SERVER CLIENT
 *                 over TCP between two network namespaces (paths; ADDRESS: the server's): per step COUNT messages of PULL bytes there and COUNT of PUSH bytes back,
 *                 and a byte that ends the step, as a worker waits until its update is applied; +overlap: a message is pushed as soon as its counterpart was pulled
 * Prints one line of JSON. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
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
static double seconds_of(struct timeval t) { return (double)t.tv_sec + 1e-6 * (double)t.tv_usec; }
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

/* Messages that cross a socket one after the other. */
struct stream { char **bufs; size_t count, size, done; };
static size_t total(const struct stream *s) { return s->count * s->size; }

/* Moves some bytes, up to the given number since the start of the stream. Up to 64 messages per sendmsg/recvmsg: starwire may coalesce, so may this program.
 * 0: would block. */
static int move_some(int fd, struct stream *s, size_t until, int out, int flags) {
  struct iovec iov[64];
  size_t n = 0;
  for (size_t at = s->done; at < until && n < 64; ++n) {
    size_t skip = at % s->size, left = s->size - skip;
    if (left > until - at) left = until - at;
    iov[n] = (struct iovec){s->bufs[at / s->size] + skip, left};
    at += left;
  }
  struct msghdr msg = {.msg_iov = iov, .msg_iovlen = n};
  ssize_t done = out ? sendmsg(fd, &msg, MSG_NOSIGNAL | flags) : recvmsg(fd, &msg, flags);
  if (done < 0 && errno == EAGAIN) return 0;
  if (done <= 0) { if (out || done < 0) die("socket"); exit(0); }
  s->done += (size_t)done;
  return 1;
}

static void move(int fd, char **bufs, size_t count, size_t size, int out) {
  struct stream s = {bufs, count, size, 0};
  while (s.done < total(&s)) move_some(fd, &s, total(&s), out, out ? 0 : MSG_WAITALL);
}

/* Both directions at once. With `echo`, a message goes out as soon as its counterpart is in. */
static void exchange(int fd, struct stream in, struct stream out, int echo) {
  while (in.done < total(&in) || out.done < total(&out)) {
    size_t until = echo && in.done < total(&in) ? in.done / in.size * out.size : total(&out);
    int moved = 0;
    if (in.done < total(&in)) moved |= move_some(fd, &in, total(&in), 0, MSG_DONTWAIT);
    if (out.done < until) moved |= move_some(fd, &out, until, 1, MSG_DONTWAIT);
    if (moved) continue;
    struct pollfd polled = {.fd = fd, .events = (short)((in.done < total(&in) ? POLLIN : 0) | (out.done < until ? POLLOUT : 0))};
    poll(&polled, 1, -1);
  }
}

static void byte(int fd, int out) {
  char value = 1;
  ssize_t done = out ? send(fd, &value, 1, MSG_NOSIGNAL) : recv(fd, &value, 1, MSG_WAITALL);
  if (done == 1) return;
  if (out || done < 0) die("socket");
  exit(0);
}

/* Sockets belong to the namespace that they were created in. */
static void enter(const char *space) {
  if (!space) return;
  int fd = open(space, O_RDONLY);
  if (fd < 0 || setns(fd, CLONE_NEWNET)) die(space);
  close(fd);
}

/* pair[0]: the worker's, pair[1]: the parameter server's. */
static void sockets(int tcp, const char *address, const char *server, const char *client, int pair[2]) {
  if (!tcp) { if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) die("socketpair"); return; }
  enter(server);
  int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
  struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = inet_addr(address)};
  socklen_t len = sizeof addr;
  if (listener < 0 || bind(listener, (struct sockaddr *)&addr, len) || listen(listener, 1) || getsockname(listener, (struct sockaddr *)&addr, &len)) die("listen");
  enter(client);
  pair[0] = socket(AF_INET, SOCK_STREAM, 0);
  if (pair[0] < 0 || connect(pair[0], (struct sockaddr *)&addr, len)) die("connect");
  pair[1] = accept(listener, NULL, NULL);
  if (pair[1] < 0) die("accept");
  close(listener);
  for (int i = 0; i < 2; ++i) setsockopt(pair[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

int main(int argc, char **argv) {
  int wire = argc == 9 && !strncmp(argv[1], "wire", 4), overlap = wire && !strcmp(argv[1], "wire+overlap");
  if (argc != 5 && !wire) {
    fprintf(stderr, "usage: bare tcp|unix|tcp+math|unix+math|memcpy COUNT SIZE SECONDS, or bare wire|wire+overlap COUNT PULL SECONDS PUSH ADDRESS SERVER CLIENT\n");
    return 2;
  }
  size_t count = strtoull(argv[2], NULL, 10), size = strtoull(argv[3], NULL, 10), steps = 0, warm = 0, room = 1 << 20;
  double seconds = strtod(argv[4], NULL), *took = malloc(room * sizeof *took), start;
  size_t push = wire ? strtoull(argv[5], NULL, 10) : size;
  if (!count || (!size && !wire) || !took) return 2;
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
  sockets(wire || !strncmp(argv[1], "tcp", 3), wire ? argv[6] : "127.0.0.1", wire ? argv[7] : NULL, wire ? argv[8] : NULL, pair);
  char **other = math || wire ? buffers(count, push) : a;
  /* With arithmetic, a message is processed while the next is in flight. */
  size_t batch = math ? 1 : count;
  pid_t child = fork();
  if (child < 0) die("fork");
  if (!child) { /* the parameter server */
    close(pair[0]);
    for (;;) {
      byte(pair[1], 0);
      if (overlap) {
        exchange(pair[1], (struct stream){other, count, push, 0}, (struct stream){a, count, size, 0}, 0);
        byte(pair[1], 1);
        continue;
      }
      move(pair[1], a, count, size, 1);
      if (wire) {
        move(pair[1], other, count, push, 0);
        byte(pair[1], 1);
        continue;
      }
      for (size_t i = 0; i < count; i += batch) {
        move(pair[1], other + i, batch, size, 0);
        if (math) subtract(a[i], other[i], size);
      }
    }
  }
  close(pair[1]);
  char **mine = buffers(count, size);
  double warm_until = now() + seconds / 5, begin = 0, last = now();
  for (;;) {
    byte(pair[0], 1);
    if (overlap) {
      exchange(pair[0], (struct stream){mine, count, size, 0}, (struct stream){other, count, push, 0}, 1);
    } else {
      for (size_t i = 0; i < count; i += batch) {
        move(pair[0], mine + i, batch, size, 0);
        if (math) multiply(other[i], mine[i], size);
      }
      move(pair[0], math || wire ? other : mine, count, push, 1);
    }
    if (wire) byte(pair[0], 0);
    double t = now();
    if (!begin) { if (t >= warm_until) begin = t; last = t; ++warm; continue; }
    if (steps < room) took[steps] = t - last;
    ++steps; last = t;
    if (t - begin >= seconds) break;
  }
  double elapsed = last - begin;
  close(pair[0]);
  waitpid(child, NULL, 0);
  size_t kept = steps < room ? steps : room;
  qsort(took, kept, sizeof *took, compare);
  struct rusage self, server;
  getrusage(RUSAGE_SELF, &self);
  getrusage(RUSAGE_CHILDREN, &server);
  double cpu = seconds_of(self.ru_utime) + seconds_of(self.ru_stime) + seconds_of(server.ru_utime) + seconds_of(server.ru_stime);
  printf("{\"bytes_per_s\": %.0f, \"steps_per_s\": %.3f, \"p10_s\": %.9f, \"p50_s\": %.9f, \"p99_s\": %.9f, \"cpu_s_per_step\": %.9f}\n",
         (double)steps * (double)count * (double)(size + push) / elapsed, (double)steps / elapsed, took[kept / 10], took[kept / 2], took[(size_t)((double)(kept - 1) * 0.99)],
         cpu / (double)(steps + warm));
  return 0;
}
