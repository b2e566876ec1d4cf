// Whether processors that this process may use have had nothing to do.
#pragma once
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define STAT_BYTES 65536  // of /proc/stat: its first lines, one for each processor

typedef struct {
    double idle, all;  // seconds of the processors that this process may use, since the machine was started
    double own;        // seconds that this process has computed
    double at;
} machine_time;

static double now_seconds(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// Add up what /proc/stat, or a file like it, says of the allowed processors; nothing where the system does not say.
#ifdef __linux__
static void count_ticks(const char *path, double *idle, double *all) {
    static char text[STAT_BYTES];  // the pool's owner is alone here
    cpu_set_t allowed;
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    const ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    if (size <= 0 || sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    text[size] = 0;
    for (const char *line = text; line && !strncmp(line, "cpu", 3); line = strchr(line, '\n'), line += line != NULL) {
        int number;
        unsigned long long user, nice, system, rest, waiting;
        if (line[3] == ' ') continue;  // the sum of all
        if (sscanf(line, "cpu%d %llu %llu %llu %llu %llu", &number, &user, &nice, &system, &rest, &waiting) != 6) continue;
        if (number >= CPU_SETSIZE || !CPU_ISSET(number, &allowed)) continue;
        *idle += (double)(rest + waiting);
        *all += (double)(user + nice + system + rest + waiting);
    }
}
#else
static void count_ticks(const char *path, double *idle, double *all) { (void)path, (void)idle, (void)all; }
#endif

static machine_time look_at_machine(void) {
    machine_time seen = {.own = now_seconds(CLOCK_PROCESS_CPUTIME_ID), .at = now_seconds(CLOCK_MONOTONIC)};
    count_ticks("/proc/stat", &seen.idle, &seen.all);
    const double tick = 1.0 / (double)sysconf(_SC_CLK_TCK);
    seen.idle *= tick, seen.all *= tick;
    return seen;
}

// Say whether between two looks others left `share` of a processor idle, beside the one on which this process waits for work
// itself; yes where nobody can tell: where the system says nothing, or its clocks stand still (gVisor). A quota of processor
// time is not seen.
static int others_left_idle(const machine_time *before, const machine_time *after, double share) {
    const double since = after->at - before->at, waited = since - (after->own - before->own);
    if (after->all - before->all < since / 2) return 1;
    return after->idle - before->idle - (waited > 0 ? waited : 0) >= share * since;
}
