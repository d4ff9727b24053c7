/* A wide-area network in one process: a TUN device ("wan0") in each node's network namespace, and packets moved between
 * them as links of a given rate, delay and loss would. Usage: wanshape CONFIG (as root; see README.md).
 *
 * Every IPv4 packet that a node sends passes its uplink (rate, drop-tail queue), the way (delay, jitter, loss) and the
 * receiver's downlink (rate, queue). Rates are in Mbit/s, all inner times in nanoseconds of the monotonic clock.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define MAX_NODES 64
#define TIMER 9999u        /* epoll's name for the timer; nodes go by their index */
#define SEGMENT_HEADERS 52 /* bytes of IP and TCP headers, with timestamps */
#define READS_AT_ONCE 64

typedef int64_t ns_t;

typedef struct {
    char name[32], ip[32], netns[64];
    uint32_t address;
    double up_mbit, down_mbit;
    ns_t queue_ns;
    int fd;
    ns_t up_free, down_free; /* when the uplink, the downlink have sent what they hold */
    uint64_t in_packets, in_bytes, out_packets, out_bytes, lost, dropped_up, dropped_down;
} node_t;

typedef struct {
    ns_t delay, jitter;
    double loss;
    ns_t last; /* arrival of the packet before: jitter never reorders a pair */
} way_t;

/* A packet under way: first it arrives at the receiver's downlink, then it has passed it. */
typedef struct {
    ns_t at;
    uint64_t number;
    uint8_t *bytes;
    int size, wire_size;
    short to, passed_downlink;
} packet_t;

static node_t nodes[MAX_NODES];
static way_t ways[MAX_NODES][MAX_NODES];
static int node_count = 0, gso = 0, mtu = 1500, tick_us = 250, header_size = 0;
static volatile sig_atomic_t stop = 0;
static double late_us = 0;
static uint64_t deliveries = 0, packet_number = 0;

static void fail(const char *what) {
    perror(what);
    exit(2);
}

static ns_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static ns_t ms(double value) { return (ns_t)(value * 1e6); }

static ns_t later(ns_t a, ns_t b) { return a > b ? a : b; }

/* xorshift64; uniform in [0, 1). */
static uint64_t random_state = 88172645463325252ULL;
static double uniform(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (random_state >> 11) * (1.0 / 9007199254740992.0);
}

/* Packets under way: a binary heap, by moment and then by number. --------------------------------------------------- */

static packet_t *heap;
static size_t heap_size = 0, heap_room = 0;

static int before(const packet_t *a, const packet_t *b) {
    return a->at < b->at || (a->at == b->at && a->number < b->number);
}

static void push(packet_t packet) {
    if (heap_size == heap_room) {
        heap_room = heap_room ? 2 * heap_room : 4096;
        heap = realloc(heap, heap_room * sizeof *heap);
        if (!heap) fail("realloc");
    }
    size_t at = heap_size++;
    while (at) {
        size_t parent = (at - 1) / 2;
        if (!before(&packet, &heap[parent])) break;
        heap[at] = heap[parent];
        at = parent;
    }
    heap[at] = packet;
}

static packet_t pop(void) {
    packet_t first = heap[0], last = heap[--heap_size];
    size_t at = 0;
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= heap_size) break;
        if (child + 1 < heap_size && before(&heap[child + 1], &heap[child])) child++;
        if (!before(&heap[child], &last)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
    return first;
}

/* Configuration ----------------------------------------------------------------------------------------------------- */

static int node_named(const char *name) {
    for (int i = 0; i < node_count; i++)
        if (!strcmp(nodes[i].name, name)) return i;
    fprintf(stderr, "unknown node %s\n", name);
    exit(2);
}

static void read_node(const char *line) {
    node_t node = {0};
    double queue_ms = 100;
    if (sscanf(line, "node %31s %31s %63s %lf %lf %lf", node.name, node.ip, node.netns, &node.up_mbit,
               &node.down_mbit, &queue_ms) < 5 || node_count == MAX_NODES) {
        fprintf(stderr, "cannot be used: %s", line);
        exit(2);
    }
    node.address = inet_addr(node.ip);
    node.queue_ns = ms(queue_ms);
    nodes[node_count++] = node;
}

static way_t way_of(double delay_ms, double jitter_ms, double loss_percent) {
    return (way_t){ms(delay_ms), ms(jitter_ms), loss_percent / 100, 0};
}

static void read_config(const char *path) {
    FILE *file = fopen(path, "r");
    if (!file) fail(path);
    char line[512], a[64], b[64];
    double x, y, z;
    way_t everywhere = {0};
    while (fgets(line, sizeof line, file)) {
        y = z = 0;
        if (!strncmp(line, "node ", 5)) read_node(line);
        else if (sscanf(line, "default %lf %lf %lf", &x, &y, &z) >= 1) everywhere = way_of(x, y, z);
        else if (sscanf(line, "gso %lf", &x) == 1) gso = (int)x;
        else if (sscanf(line, "mtu %lf", &x) == 1) mtu = (int)x;
        else if (sscanf(line, "tick_us %lf", &x) == 1) tick_us = (int)x;
        else if (sscanf(line, "seed %lf", &x) == 1) random_state ^= (uint64_t)x * 2654435761ULL;
    }
    for (int i = 0; i < node_count; i++)
        for (int j = 0; j < node_count; j++) ways[i][j] = everywhere;
    rewind(file);
    while (fgets(line, sizeof line, file)) {
        y = z = 0;
        if (sscanf(line, "pair %63s %63s %lf %lf %lf", a, b, &x, &y, &z) >= 3) {
            int i = node_named(a), j = node_named(b);
            ways[i][j] = ways[j][i] = way_of(x, y, z);
        }
    }
    fclose(file);
}

/* The node's end: a TUN device made inside its namespace and held open from here. */
static void open_device(node_t *node) {
    char path[128], command[512];
    snprintf(path, sizeof path, "/run/netns/%s", node->netns);
    int own = open("/proc/self/ns/net", O_RDONLY), theirs = open(path, O_RDONLY);
    if (own < 0 || theirs < 0) fail(path);
    if (setns(theirs, CLONE_NEWNET)) fail("setns");
    node->fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (node->fd < 0) fail("/dev/net/tun");
    struct ifreq request = {0};
    strcpy(request.ifr_name, "wan0");
    request.ifr_flags = IFF_TUN | IFF_NO_PI | (gso ? IFF_VNET_HDR : 0);
    if (ioctl(node->fd, TUNSETIFF, &request)) fail("TUNSETIFF");
    if (gso && ioctl(node->fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)) fail("TUNSETOFFLOAD");
    if (setns(own, CLONE_NEWNET)) fail("setns");
    close(own);
    close(theirs);
    const char *ns = node->netns;
    snprintf(command, sizeof command,
             "ip -n %s link set lo up && ip -n %s addr add %s/16 dev wan0 && "
             "ip -n %s link set wan0 mtu %d txqueuelen 10000 up", ns, ns, node->ip, ns, mtu);
    if (system(command)) {
        fprintf(stderr, "failed: %s\n", command);
        exit(2);
    }
}

/* Packets ----------------------------------------------------------------------------------------------------------- */

/* Bytes on the wire: a super-packet stands for segments that have headers of their own. */
static int wire_size(const uint8_t *frame, int size) {
    if (!gso) return size;
    uint16_t segment;
    memcpy(&segment, frame + 4, 2); /* virtio_net_hdr: flags, gso_type, hdr_len, gso_size */
    if (!frame[1] || !segment) return size;
    return size + ((size - 40 + segment - 1) / segment - 1) * SEGMENT_HEADERS;
}

static ns_t transmission(int size, double rate_mbit) { return (ns_t)(size * 8e3 / rate_mbit); }

static void take_packet(int from, const uint8_t *frame, int frame_size) {
    const uint8_t *ip = frame + header_size;
    int size = frame_size - header_size, to = -1;
    uint32_t address;
    if ((ip[0] >> 4) != 4) return;
    node_t *sender = &nodes[from];
    sender->in_packets++;
    sender->in_bytes += size;
    memcpy(&address, ip + 16, 4);
    for (int i = 0; i < node_count && to < 0; i++)
        if (nodes[i].address == address) to = i;
    if (to < 0) return;
    way_t *way = &ways[from][to];
    if (way->loss > 0 && uniform() < way->loss) {
        sender->lost++;
        return;
    }
    int wire = wire_size(frame, size);
    ns_t t = now(), start = later(sender->up_free, t);
    if (start - t > sender->queue_ns) {
        sender->dropped_up++;
        return;
    }
    sender->up_free = start + transmission(wire, sender->up_mbit);
    ns_t jitter = way->jitter ? (ns_t)(uniform() * way->jitter) : 0;
    way->last = later(sender->up_free + way->delay + jitter, way->last);
    uint8_t *copy = malloc(frame_size);
    if (!copy) fail("malloc");
    memcpy(copy, frame, frame_size);
    push((packet_t){way->last, packet_number++, copy, frame_size, wire, (short)to, 0});
}

static void read_packets(int from) {
    static uint8_t frame[70000];
    for (int i = 0; i < READS_AT_ONCE; i++) {
        int size = read(nodes[from].fd, frame, sizeof frame);
        if (size <= header_size) return;
        take_packet(from, frame, size);
    }
}

static void move_due_packets(void) {
    ns_t t = now();
    for (unsigned moved = 1; heap_size && heap[0].at <= t; moved++) {
        packet_t packet = pop();
        node_t *receiver = &nodes[packet.to];
        if (packet.passed_downlink) {
            late_us += (t - packet.at) * 1e-3;
            deliveries++;
            if (write(receiver->fd, packet.bytes, packet.size) == packet.size) {
                receiver->out_packets++;
                receiver->out_bytes += packet.size - header_size;
            }
            free(packet.bytes);
        } else {
            ns_t start = later(receiver->down_free, packet.at);
            if (start - packet.at > receiver->queue_ns) {
                receiver->dropped_down++;
                free(packet.bytes);
                continue;
            }
            packet.at = receiver->down_free = start + transmission(packet.wire_size, receiver->down_mbit);
            packet.passed_downlink = 1;
            push(packet);
        }
        if (moved % 16 == 0) t = now();
    }
}

static void on_signal(int number) {
    (void)number;
    stop = 1;
}

/* Wake up at the next packet's moment, rounded up to a tick: fewer wake-ups, less CPU. */
static void arm(int timer, ns_t *armed) {
    ns_t at = heap[0].at;
    if (tick_us > 0) {
        ns_t tick = tick_us * 1000LL;
        at = (at + tick - 1) / tick * tick;
    }
    if (at == *armed) return;
    struct itimerspec when = {.it_value = {at / 1000000000LL, at % 1000000000LL}};
    timerfd_settime(timer, TFD_TIMER_ABSTIME, &when, 0);
    *armed = at;
}

static void run(void) {
    int poll = epoll_create1(EPOLL_CLOEXEC), timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (poll < 0 || timer < 0) fail("epoll or timerfd");
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = TIMER}, events[MAX_NODES + 1];
    epoll_ctl(poll, EPOLL_CTL_ADD, timer, &event);
    for (int i = 0; i < node_count; i++) {
        event.data.u32 = (uint32_t)i;
        epoll_ctl(poll, EPOLL_CTL_ADD, nodes[i].fd, &event);
    }
    ns_t armed = 0;
    while (!stop) {
        if (heap_size && heap[0].at + 1000000LL <= now()) move_due_packets();
        if (heap_size) arm(timer, &armed);
        int count = epoll_wait(poll, events, MAX_NODES + 1, 1000);
        for (int i = 0; i < count; i++) {
            uint64_t expirations;
            if (events[i].data.u32 != TIMER) {
                read_packets((int)events[i].data.u32);
            } else {
                if (read(timer, &expirations, sizeof expirations) < 0 && errno != EAGAIN) fail("timer");
                armed = 0;
                move_due_packets();
            }
        }
    }
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: wanshape CONFIG\n");
        return 2;
    }
    read_config(argv[1]);
    header_size = gso ? 10 : 0;
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* the network goes with whoever made it */
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    for (int i = 0; i < node_count; i++) open_device(&nodes[i]);
    prctl(PR_SET_TIMERSLACK, 1);
    mlockall(MCL_CURRENT | MCL_FUTURE);
    struct sched_param priority = {.sched_priority = 10};
    sched_setscheduler(0, SCHED_RR, &priority); /* where allowed; later than the clock says is only worse timing */
    printf("ready %d nodes gso=%d\n", node_count, gso);
    fflush(stdout);
    run();
    for (int i = 0; i < node_count; i++) {
        node_t *n = &nodes[i];
        printf("%s in %llu packets %llu bytes, out %llu packets %llu bytes, lost %llu, dropped by uplink %llu, "
               "by downlink %llu\n", n->name, (unsigned long long)n->in_packets, (unsigned long long)n->in_bytes,
               (unsigned long long)n->out_packets, (unsigned long long)n->out_bytes, (unsigned long long)n->lost,
               (unsigned long long)n->dropped_up, (unsigned long long)n->dropped_down);
    }
    struct timespec cpu;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &cpu);
    printf("cpu_s %.3f mean_late_us %.1f\n", cpu.tv_sec + cpu.tv_nsec * 1e-9, deliveries ? late_us / deliveries : 0.0);
    return 0;
}
