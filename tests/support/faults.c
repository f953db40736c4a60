/* Stands between a process and its file system calls, for tests: counts those below one folder that change it, and at
 * a chosen one kills the process, tears a write in half first, or makes the call fail. Loaded by LD_PRELOAD; armed and
 * read through ctypes. Every call is also written to a trace, from which the tests rebuild what a power cut may leave.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OFF, KILL, TEAR, FAIL, FAIL_FROM };

static char root[PATH_MAX];
static int mode = OFF, target, failure, trace = -1;
int calls;

void arm(const char *folder, int how, int at, int error, int trace_fd) {
    snprintf(root, sizeof root, "%s", folder);
    mode = how, target = at, failure = error, trace = trace_fd, calls = 0;
}

#define REAL(name, ...) ((int (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

static int below(const char *path) { return root[0] && !strncmp(path, root, strlen(root)); }

static void full(char *out, int folder, const char *path) {
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return;
    }
    char link[64], base[PATH_MAX];
    snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
    ssize_t n = readlink(link, base, sizeof base - 1);
    base[n < 0 ? 0 : n] = 0;
    snprintf(out, PATH_MAX, "%.2000s/%.2000s", base, path);
}

static int open_path(char *out, int fd) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    out[n < 0 ? 0 : n] = 0;
    return n > 0;
}

static void note(const char *what, const char *path, const char *other, const void *data, size_t size) {
    if (trace < 0)
        return;
    dprintf(trace, "%s\t%s\t%s\t", what, path, other);
    for (size_t i = 0; i < size; i++)
        dprintf(trace, "%02x", ((const unsigned char *)data)[i]);
    dprintf(trace, "\n");
}

/* 1: let it happen; 0: it fails with errno */
static int passes(const char *what, const char *path, const char *other, const void *data, size_t size) {
    calls++;
    int here = calls == target;
    if (here && mode == KILL)
        kill(getpid(), SIGKILL);
    if ((here && mode == FAIL) || (calls >= target && mode == FAIL_FROM)) {
        errno = failure;
        return 0;
    }
    note(what, path, other, data, size);
    return 1;
}

static int opened(int folder, const char *path, int flags, int bits, int (*real)(int, const char *, int, ...)) {
    char name[PATH_MAX];
    full(name, folder, path);
    if (mode != OFF && below(name) && flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR)) {
        int fresh = access(name, F_OK) != 0;
        if (!passes(fresh ? "create" : flags & O_TRUNC ? "truncate" : "open", name, "", "", 0))
            return -1;
    }
    return real(folder, path, flags, bits);
}

#define OPEN(name)                                                                   \
    int name(const char *path, int flags, ...) {                                     \
        va_list list;                                                                \
        va_start(list, flags);                                                       \
        int bits = va_arg(list, int);                                                \
        va_end(list);                                                                \
        return opened(AT_FDCWD, path, flags, bits, dlsym(RTLD_NEXT, "openat64"));    \
    }
#define OPENAT(name)                                                                 \
    int name(int folder, const char *path, int flags, ...) {                         \
        va_list list;                                                                \
        va_start(list, flags);                                                       \
        int bits = va_arg(list, int);                                                \
        va_end(list);                                                                \
        return opened(folder, path, flags, bits, dlsym(RTLD_NEXT, "openat64"));      \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int fd, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real)
        real = dlsym(RTLD_NEXT, "write");
    char name[PATH_MAX];
    if (mode == OFF || fd == trace || !open_path(name, fd) || !below(name))
        return real(fd, data, size);
    if (mode == TEAR && calls + 1 == target) {
        real(fd, data, size / 2);
        kill(getpid(), SIGKILL);
    }
    return passes("write", name, "", data, size) ? real(fd, data, size) : -1;
}

#define ON_FD(name)                                                                  \
    int name(int fd) {                                                               \
        char path[PATH_MAX];                                                         \
        if (mode != OFF && open_path(path, fd) && below(path) && !passes("fsync", path, "", "", 0)) \
            return -1;                                                               \
        return REAL(name, int)(fd);                                                  \
    }
ON_FD(fsync)
ON_FD(fdatasync)

#define ON_PATH(call, folder, path, what, ...)                                       \
    char name[PATH_MAX];                                                             \
    full(name, folder, path);                                                        \
    if (mode != OFF && below(name) && !passes(what, name, "", "", 0))                \
        return -1;                                                                   \
    return call(__VA_ARGS__);

int mkdir(const char *path, mode_t bits) {
    ON_PATH(REAL(mkdir, const char *, mode_t), AT_FDCWD, path, access(name, F_OK) ? "mkdir" : "mkdir-again", path, bits)
}
int rmdir(const char *path) { ON_PATH(REAL(rmdir, const char *), AT_FDCWD, path, "rmdir", path) }
int unlink(const char *path) { ON_PATH(REAL(unlink, const char *), AT_FDCWD, path, "unlink", path) }
int unlinkat(int folder, const char *path, int flags) {
    ON_PATH(REAL(unlinkat, int, const char *, int), folder, path, flags & AT_REMOVEDIR ? "rmdir" : "unlink", folder,
            path, flags)
}

#define TWO_PATHS(call, what)                                                        \
    char a[PATH_MAX], b[PATH_MAX];                                                   \
    full(a, AT_FDCWD, from), full(b, AT_FDCWD, to);                                  \
    if (mode != OFF && below(a) && !passes(what, a, b, "", 0))                       \
        return -1;                                                                   \
    return REAL(call, const char *, const char *)(from, to);

int rename(const char *from, const char *to) { TWO_PATHS(rename, "rename") }
int link(const char *from, const char *to) { TWO_PATHS(link, "link") }
