/* An emulated network: hosts (network namespaces), each with one cable to a switch.
 *   relay HOSTS   creates HOSTS namespaces and prints {"namespaces": [descriptor, …], "priority": …}: open them as /proc/PID/fd/DESCRIPTOR.
 *                 Host n (from 0) has the address 10.99.0.(n+1).
 * Then one command per line on stdin, each answered by one line on stdout; the network ends with stdin:
 *   wire BITS_PER_SECOND DELAY_NS QUEUE_BYTES   the rate of every cable in each direction (0: no limit), the one-way delay between two hosts, and the
 *                                               length of the queue in front of each end of a cable: a packet that does not fit is dropped
 *   counters                                    see `counters`
 * The devices take and deliver segments of TCP that the kernel did not cut into packets yet (as network cards do); they count as the packets that they would be on
 * a cable. Their length is limited by the time that they occupy a cable. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/rtnetlink.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
  MAX_HOSTS = 16,
  MTU = 1500,
  ETHERNET = 38,           /* header, checksum, preamble and gap of an Ethernet frame */
  SLOT = 68 * 1024,        /* the longest segment and its header */
  SLOTS = 1 << 15,
  LATE_BUCKETS = 20,
  TUN_QUEUE = 10000,
};
/* How long a segment occupies a cable at most: the one-way delay, within these bounds. Its first packets arrive as late as its last, so it should be short; but each
 * costs tens of microseconds of CPU, as does its acknowledgement. */
static const int64_t LEAST_BURST_NS = 50000, MOST_BURST_NS = 200000;
static const int64_t MOST_WAKE_NS = 25000;    /* timers are set earlier by their usual lateness, up to this; the rest of the time is polled */
static const int64_t SLEPT_NS = 4000;         /* polling that took longer was a sleep, until a packet came or the timer expired */
static const int64_t EARLY_NS = 3000;   /* a packet may be delivered this much too early, which saves wake-ups; delivery itself takes about as long */

struct packet {
  struct packet *next;
  char *data;
  size_t length;   /* with the virtio header */
  int64_t bytes;   /* on the cable */
  int64_t payload; /* of TCP */
  int64_t when;    /* at the end of a cable */
  int to;
};

struct queue {
  struct packet *first, *last;
  int64_t free_at; /* when the cable has sent everything before */
};

struct traffic {
  int64_t segments, bytes, payload, dropped;
};

struct host {
  int tun, netlink, index;
  struct queue up, down;        /* to the switch, and from it */
  struct traffic sent, received;
};

static struct host hosts[MAX_HOSTS];
static int host_count;
static double bits_per_ns;
static int64_t delay_ns, queue_bytes, late[LATE_BUCKETS];
static struct packet *unused;

static int64_t now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000LL + t.tv_nsec; }
static void die(const char *what) { fprintf(stderr, "relay: %s: %s\n", what, strerror(errno)); exit(1); }
static int64_t time_of(int64_t bytes) { return bits_per_ns > 0 ? (int64_t)((double)bytes * 8 / bits_per_ns) : 0; }

/* ---- devices */

static void set_up(int sock, const char *name) {
  struct ifreq request = {0};
  snprintf(request.ifr_name, IFNAMSIZ, "%s", name);
  if (ioctl(sock, SIOCGIFFLAGS, &request)) die("SIOCGIFFLAGS");
  request.ifr_flags |= IFF_UP;
  if (ioctl(sock, SIOCSIFFLAGS, &request)) die("SIOCSIFFLAGS");
}

static void set_address(int sock, unsigned long what, struct ifreq *request, uint32_t value) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(value)};
  memcpy(&request->ifr_addr, &address, sizeof address);
  if (ioctl(sock, what, request)) die("address of the device");
}

/* Sets a property of the host's device. (The ioctls for these are reserved for root outside user namespaces, or do not exist.) */
static void set_link(struct host *host, uint16_t attribute, uint32_t value) {
  struct {
    struct nlmsghdr head;
    struct ifinfomsg info;
    struct rtattr attribute;
    uint32_t value;
  } request = {
    .head = {.nlmsg_len = sizeof request, .nlmsg_type = RTM_NEWLINK, .nlmsg_flags = NLM_F_REQUEST | NLM_F_ACK},
    .info = {.ifi_family = AF_UNSPEC, .ifi_index = host->index},
    .attribute = {.rta_len = RTA_LENGTH(sizeof value), .rta_type = attribute},
    .value = value,
  };
  struct { struct nlmsghdr head; struct nlmsgerr error; char more[256]; } answer;
  if (send(host->netlink, &request, sizeof request, 0) < 0 || recv(host->netlink, &answer, sizeof answer, 0) < 0) die("netlink");
  errno = answer.head.nlmsg_type == NLMSG_ERROR ? -answer.error.error : 0;
  if (errno) die("changing the device");
}

/* Creates a namespace; this process stays in it. */
static int open_host(struct host *host, int number) {
  if (unshare(CLONE_NEWNET)) die("creating a network namespace");
  int space = open("/proc/self/ns/net", O_RDONLY);
  int sock = socket(AF_INET, SOCK_DGRAM, 0);
  if (space < 0 || sock < 0) die("namespace");
  host->tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
  if (host->tun < 0) die("/dev/net/tun");
  struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
  snprintf(request.ifr_name, IFNAMSIZ, "wire0");
  if (ioctl(host->tun, TUNSETIFF, &request)) die("TUNSETIFF");
  if (ioctl(host->tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)) die("TUNSETOFFLOAD");
  set_address(sock, SIOCSIFADDR, &request, 0x0a630001u + (uint32_t)number);
  set_address(sock, SIOCSIFNETMASK, &request, 0xffffff00u);
  request.ifr_mtu = MTU;
  if (ioctl(sock, SIOCSIFMTU, &request)) die("SIOCSIFMTU");
  if (ioctl(sock, SIOCGIFINDEX, &request)) die("SIOCGIFINDEX");
  host->index = request.ifr_ifindex;
  host->netlink = socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE);
  if (host->netlink < 0) die("netlink");
  set_link(host, IFLA_TXQLEN, TUN_QUEUE);
  set_up(sock, "lo");
  set_up(sock, "wire0");
  close(sock);
  return space;
}

/* ---- packets */

static void put(struct queue *queue, struct packet *packet) {
  packet->next = NULL;
  if (queue->last) queue->last->next = packet; else queue->first = packet;
  queue->last = packet;
}

static struct packet *take(struct queue *queue) {
  struct packet *packet = queue->first;
  queue->first = packet->next;
  if (!queue->first) queue->last = NULL;
  return packet;
}

static void release(struct packet *packet) { packet->next = unused; unused = packet; }

/* Sets destination and lengths; 0 if the packet goes nowhere. */
static int classify(struct packet *packet) {
  const struct virtio_net_hdr *head = (const void *)packet->data;
  const uint8_t *ip = (const uint8_t *)packet->data + sizeof *head;
  int64_t length = (int64_t)packet->length - (int64_t)sizeof *head, headers = (ip[0] & 15) * 4, segments = 1;
  if (length < 20 || ip[0] >> 4 != 4) return 0; /* such as IPv6 router solicitations */
  uint32_t to = ((uint32_t)ip[16] << 24 | (uint32_t)ip[17] << 16 | (uint32_t)ip[18] << 8 | ip[19]) - 0x0a630001u;
  if (to >= (uint32_t)host_count) return 0;
  packet->to = (int)to;
  packet->payload = 0;
  if (ip[9] == IPPROTO_TCP && length >= headers + 20) {
    headers += (ip[headers + 12] >> 4) * 4;
    packet->payload = length - headers;
    if (head->gso_type != VIRTIO_NET_HDR_GSO_NONE && head->gso_size) segments = (packet->payload + head->gso_size - 1) / head->gso_size;
  }
  packet->bytes = length + (segments - 1) * headers + segments * ETHERNET;
  return 1;
}

/* Queues a packet for a cable. The cable may have begun to send it at `from`; the queue is as long as it is at `at`. 0: it is full. */
static int enter(struct queue *queue, struct packet *packet, int64_t from, int64_t at) {
  int64_t takes = time_of(packet->bytes), start = from > queue->free_at ? from : queue->free_at;
  if (bits_per_ns > 0 && queue->free_at > at && queue->free_at - at + takes > time_of(queue_bytes)) return 0;
  packet->when = queue->free_at = start + takes;
  put(queue, packet);
  return 1;
}

static void drop(struct host *host, struct packet *packet) {
  ++host->sent.dropped;
  release(packet);
}

static void count(struct traffic *traffic, const struct packet *packet) {
  ++traffic->segments;
  traffic->bytes += packet->bytes;
  traffic->payload += packet->payload;
}

/* From a host's device to its cable. The packets came after `since`: while the relay was busy elsewhere, the cable was not. */
static void read_host(struct host *host, int64_t since) {
  for (int i = 0; i < 64 && unused; ++i) {
    struct packet *packet = unused;
    ssize_t length = read(host->tun, packet->data, SLOT);
    if (length < 0) {
      if (errno != EAGAIN && errno != EINTR) die("reading the device");
      return;
    }
    unused = packet->next;
    packet->length = (size_t)length;
    if (packet->length <= sizeof(struct virtio_net_hdr) || !classify(packet)) { release(packet); continue; }
    count(&host->sent, packet);
    if (!enter(&host->up, packet, since, now())) drop(host, packet);
  }
}

/* From the cables to the switch, in order of arrival. The switch begins to forward a segment with its first packet, so a cable of the same rate adds no time. */
static void forward(int64_t until) {
  for (;;) {
    struct host *from = NULL;
    for (int i = 0; i < host_count; ++i) {
      struct packet *first = hosts[i].up.first;
      if (first && first->when <= until && (!from || first->when < from->up.first->when)) from = &hosts[i];
    }
    if (!from) return;
    struct packet *packet = take(&from->up);
    if (!enter(&hosts[packet->to].down, packet, packet->when - time_of(packet->bytes), packet->when)) drop(from, packet);
  }
}

static void note_lateness(int64_t ns) {
  int bucket = 0;
  for (int64_t us = ns / 1000; us > 0 && bucket < LATE_BUCKETS - 1; us /= 2) ++bucket;
  ++late[bucket];
}

/* From the switch to the hosts. */
static void deliver(struct host *host, int64_t until) {
  while (host->down.first && host->down.first->when + delay_ns <= until) {
    struct packet *packet = take(&host->down);
    note_lateness(now() - packet->when - delay_ns);
    if (write(host->tun, packet->data, packet->length) < 0 && errno != EAGAIN && errno != ENOBUFS && errno != EIO) die("writing to the device");
    count(&host->received, packet);
    release(packet);
  }
}

static int64_t next_event(void) {
  int64_t next = INT64_MAX;
  for (int i = 0; i < host_count; ++i) {
    const struct queue *both[] = {&hosts[i].up, &hosts[i].down};
    for (int j = 0; j < 2; ++j)
      if (both[j]->first && both[j]->first->when + delay_ns < next) next = both[j]->first->when + delay_ns;
  }
  return next;
}

/* ---- commands */

static void print_traffic(const char *name, const struct traffic *t) {
  printf("\"%s\": {\"segments\": %lld, \"bytes\": %lld, \"payload\": %lld, \"dropped\": %lld}", name, (long long)t->segments, (long long)t->bytes, (long long)t->payload, (long long)t->dropped);
}

/* For each host what it sent and received since the start (bytes: on the cable; dropped: segments that it sent and that did not fit into a queue), the CPU time of this
 * process (with the kernel's work for what it delivers), and how late segments were delivered: late[n] of them by less than 2^n microseconds. */
static void counters(void) {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  printf("{\"cpu_s\": %.6f, \"late\": [", (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) + 1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec));
  for (int i = 0; i < LATE_BUCKETS; ++i) printf("%s%lld", i ? ", " : "", (long long)late[i]);
  printf("], \"hosts\": [");
  for (int i = 0; i < host_count; ++i) {
    printf("%s{", i ? ", " : "");
    print_traffic("sent", &hosts[i].sent);
    printf(", ");
    print_traffic("received", &hosts[i].received);
    printf("}");
  }
  printf("]}\n");
}

static void command(void) {
  static char line[256];
  double bits;
  long long delay, queue;
  if (!fgets(line, sizeof line, stdin)) exit(0);
  if (!strncmp(line, "counters", 8)) {
    counters();
  } else if (sscanf(line, "wire %lf %lld %lld", &bits, &delay, &queue) == 3 && bits >= 0 && delay >= 0 && queue >= 2 * MTU) {
    bits_per_ns = bits / 1e9;
    delay_ns = delay;
    queue_bytes = queue;
    int64_t burst_ns = delay < LEAST_BURST_NS ? LEAST_BURST_NS : delay > MOST_BURST_NS ? MOST_BURST_NS : delay;
    double burst = bits > 0 ? bits / 8e9 * (double)burst_ns : 65536;
    for (int i = 0; i < host_count; ++i) {
      set_link(&hosts[i], IFLA_GSO_MAX_SIZE, burst > 65536 ? 65536 : burst < 2 * MTU ? 2 * MTU : (uint32_t)burst);
      hosts[i].up.free_at = hosts[i].down.free_at = 0;
    }
    printf("{}\n");
  } else {
    fprintf(stderr, "relay: not a command: %s", line);
    exit(2);
  }
  fflush(stdout);
}

/* A delayed relay is a slow wire: it runs before the programs that it connects, if it may. */
static const char *go_first(void) {
  if (!sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1})) return "real time";
  if (!setpriority(PRIO_PROCESS, 0, -20)) return "nice -20";
  return "normal";
}

int main(int argc, char **argv) {
  host_count = argc == 2 ? atoi(argv[1]) : 0;
  if (host_count < 2 || host_count > MAX_HOSTS) { fprintf(stderr, "usage: relay HOSTS\n"); return 2; }
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  prctl(PR_SET_TIMERSLACK, 1UL);
  struct packet *packets = calloc(SLOTS, sizeof *packets);
  char *room = mmap(NULL, (size_t)SLOTS * SLOT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (!packets || room == MAP_FAILED) die("memory");
  for (int i = SLOTS - 1; i >= 0; --i) {
    packets[i].data = room + (size_t)i * SLOT;
    release(&packets[i]);
  }
  int spaces[MAX_HOSTS];
  for (int i = 0; i < host_count; ++i) spaces[i] = open_host(&hosts[i], i);
  printf("{\"namespaces\": [");
  for (int i = 0; i < host_count; ++i) printf("%s%d", i ? ", " : "", spaces[i]);
  printf("], \"priority\": \"%s\"}\n", go_first());
  fflush(stdout);
  struct pollfd polled[MAX_HOSTS + 1] = {{.fd = 0, .events = POLLIN}};
  for (int i = 0; i < host_count; ++i) polled[i + 1] = (struct pollfd){.fd = hosts[i].tun, .events = POLLIN};
  int64_t wake_ns = 0; /* how late timers usually are */
  for (int64_t looked = now();;) {
    int64_t t = now() + EARLY_NS;
    forward(t);
    for (int i = 0; i < host_count; ++i) deliver(&hosts[i], t);
    int64_t next = next_event(), asked = now(), wait = next - asked - EARLY_NS - wake_ns;
    if (wait < 0) wait = 0; /* too short for a timer: poll until then */
    struct timespec timeout = {wait / 1000000000, wait % 1000000000};
    int ready = ppoll(polled, (nfds_t)host_count + 1, next == INT64_MAX ? NULL : &timeout, NULL);
    if (ready < 0 && errno != EINTR) die("ppoll");
    int64_t woken = now(), since = woken - asked > SLEPT_NS ? woken : looked;
    looked = woken;
    if (!ready && wait) wake_ns += (woken - asked - wait - wake_ns) / 16;
    if (wake_ns > MOST_WAKE_NS) wake_ns = MOST_WAKE_NS;
    for (int i = 0; i < host_count; ++i)
      if (polled[i + 1].revents) read_host(&hosts[i], since);
    if (polled[0].revents) command();
  }
}
