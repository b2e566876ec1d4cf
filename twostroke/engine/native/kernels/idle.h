// How long the machine's cores have had nothing to do.
#pragma once
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

// Seconds since it was started, over all cores; negative where the system does not say.
static double idle_seconds(void) {
    char text[256];
    const int file = open("/proc/stat", O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    const ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    if (size <= 0) return -1;
    text[size] = 0;
    unsigned long long idle, waiting;  // after user, nice and system
    if (sscanf(text, "cpu %*u %*u %*u %llu %llu", &idle, &waiting) != 2) return -1;
    return (double)(idle + waiting) / (double)sysconf(_SC_CLK_TCK);
}
