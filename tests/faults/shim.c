/* Loaded before libc: counts, records and spoils what a process does to the files below one folder.
 *
 * Counted: opening a file for writing, write, fsync, ftruncate, rename, unlink, rmdir and mkdir, whoever calls them.
 * A record is seven numbers, two paths and, for a write, the bytes: shim.py reads it. One is made of every operation that
 * is counted, also where it changed nothing, so the n-th record is that of the operation with the number n.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, WRITE, SYNC, RENAME, UNLINK, RMDIR, MKDIR, TRUNCATE };
enum { NONE, FAIL, FULL, SHORT, KILL, TORN };
enum { PASS, SPOILED, HALF };

static char root[PATH_MAX];
static size_t root_length;
static int mode, record = -1;
static long at, count;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

void shim_arm(const char *folder, int fault, long operation, const char *file) {
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
    mode = fault, at = operation, count = 0;
    if (*file) record = syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
}

static int below(const char *path) {
    return root_length && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static void full_path(int folder, const char *path, char *out) {
    char base[PATH_MAX] = "", link[64];
    if (*path != '/') {
        snprintf(link, sizeof link, folder == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, base, sizeof base - 1);
        base[length > 0 ? length : 0] = 0;
        strncat(base, "/", sizeof base - strlen(base) - 1);
    }
    if (snprintf(out, PATH_MAX, "%s%s", base, path) >= PATH_MAX) *out = 0;
}

static void path_of(int descriptor, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    out[length > 0 ? length : 0] = 0;
}

/* Count an operation, and say what is to become of it. */
static int meet(int kind) {
    long number = ++count;
    if (mode == FULL && number >= at && (kind == CREATE || kind == WRITE || kind == SYNC || kind == MKDIR)) {
        errno = ENOSPC;
        return SPOILED;
    }
    if (number != at || mode == FULL) return PASS;
    if (mode == KILL || (mode == TORN && kind != WRITE)) syscall(SYS_kill, getpid(), SIGKILL);
    if ((mode == SHORT || mode == TORN) && kind == WRITE) return HALF;
    if (mode != FAIL) return PASS;
    errno = EIO;
    return SPOILED;
}

static void note(int kind, int changed, uint64_t inode, int64_t offset, const char *path, const char *other,
                 const void *data, size_t size) {
    if (record < 0) return;
    int64_t head[7] = {kind, changed, inode, offset, strlen(path), strlen(other), size};
    struct iovec parts[] = {
        {head, sizeof head}, {(void *)path, head[4]}, {(void *)other, head[5]}, {(void *)data, size}};
    syscall(SYS_writev, record, parts, 4);
}

static uint64_t inode_of(const char *path) {
    struct stat found;
    return lstat(path, &found) ? 0 : found.st_ino;
}

static uint64_t inode_at(int descriptor) {
    struct stat found;
    return fstat(descriptor, &found) ? 0 : found.st_ino;
}

static int opened(int folder, const char *name, int flags, mode_t permissions) {
    char path[PATH_MAX];
    full_path(folder, name, path);
    int writes = (flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT;
    if (!writes || !below(path)) return REAL(openat)(folder, name, flags, permissions);
    int existed = inode_of(path) != 0;
    if (meet(CREATE) == SPOILED) return -1;
    int descriptor = REAL(openat)(folder, name, flags, permissions);
    int cut = existed && flags & O_TRUNC, reason = errno;
    note(cut ? TRUNCATE : CREATE, descriptor >= 0 && (cut || !existed), inode_at(descriptor), 0, path, "", "", 0);
    errno = reason;
    return descriptor;
}

#define PERMISSIONS                                                        \
    mode_t permissions = 0;                                                \
    if (flags & (O_CREAT | __O_TMPFILE)) {                                 \
        va_list more;                                                      \
        va_start(more, flags);                                             \
        permissions = va_arg(more, mode_t);                                \
        va_end(more);                                                      \
    }
int open(const char *path, int flags, ...) { PERMISSIONS return opened(AT_FDCWD, path, flags, permissions); }
int open64(const char *path, int flags, ...) { PERMISSIONS return opened(AT_FDCWD, path, flags, permissions); }
int openat(int folder, const char *path, int flags, ...) { PERMISSIONS return opened(folder, path, flags, permissions); }
int openat64(int folder, const char *path, int flags, ...) {
    PERMISSIONS return opened(folder, path, flags, permissions);
}

static ssize_t written(int descriptor, const void *data, size_t size, off_t offset, int positioned) {
    char path[PATH_MAX];
    path_of(descriptor, path);
    if (root_length && below(path)) {
        int met = meet(WRITE);
        if (met == SPOILED) return -1;
        if (met == HALF && size > 1) size /= 2;
        struct stat found;
        fstat(descriptor, &found);
        int64_t where = positioned ? offset
                        : fcntl(descriptor, F_GETFL) & O_APPEND ? found.st_size
                                                                : lseek(descriptor, 0, SEEK_CUR);
        note(WRITE, 1, found.st_ino, where, path, "", data, size);
    }
    ssize_t done = positioned ? syscall(SYS_pwrite64, descriptor, data, size, offset)
                              : syscall(SYS_write, descriptor, data, size);
    if (root_length && mode == TORN && count == at && below(path)) syscall(SYS_kill, getpid(), SIGKILL);
    return done;
}

ssize_t write(int descriptor, const void *data, size_t size) { return written(descriptor, data, size, 0, 0); }
ssize_t pwrite(int descriptor, const void *data, size_t size, off_t offset) {
    return written(descriptor, data, size, offset, 1);
}
ssize_t pwrite64(int descriptor, const void *data, size_t size, off64_t offset) {
    return written(descriptor, data, size, offset, 1);
}
/* A write of the first part alone is a short one, which callers go on from. */
ssize_t writev(int descriptor, const struct iovec *parts, int number) {
    for (int i = 0; i < number; i++)
        if (parts[i].iov_len) return written(descriptor, parts[i].iov_base, parts[i].iov_len, 0, 0);
    return 0;
}

static int synced(int descriptor, long call) {
    char path[PATH_MAX];
    path_of(descriptor, path);
    if (below(path)) {
        if (meet(SYNC) == SPOILED) return -1;
        note(SYNC, 1, inode_at(descriptor), 0, path, "", "", 0);
        return 0; /* the disk itself is not under test */
    }
    return syscall(call, descriptor);
}
int fsync(int descriptor) { return synced(descriptor, SYS_fsync); }
int fdatasync(int descriptor) { return synced(descriptor, SYS_fdatasync); }

static int truncated(int descriptor, off_t size) {
    char path[PATH_MAX];
    path_of(descriptor, path);
    if (below(path)) {
        if (meet(TRUNCATE) == SPOILED) return -1;
        note(TRUNCATE, 1, inode_at(descriptor), size, path, "", "", 0);
    }
    return syscall(SYS_ftruncate, descriptor, size);
}
int ftruncate(int descriptor, off_t size) { return truncated(descriptor, size); }
int ftruncate64(int descriptor, off64_t size) { return truncated(descriptor, size); }

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    char a[PATH_MAX], b[PATH_MAX];
    full_path(from, old, a), full_path(to, new, b);
    if (below(a) || below(b)) {
        if (meet(RENAME) == SPOILED) return -1;
    }
    uint64_t inode = inode_of(a);
    int failed = syscall(SYS_renameat2, from, old, to, new, flags);
    if (below(a) || below(b)) note(RENAME, !failed, inode, 0, a, b, "", 0);
    return failed;
}
int rename(const char *old, const char *new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return renameat2(from, old, to, new, 0); }

int unlinkat(int folder, const char *name, int flags) {
    char path[PATH_MAX];
    full_path(folder, name, path);
    int kind = flags & AT_REMOVEDIR ? RMDIR : UNLINK;
    if (below(path) && meet(kind) == SPOILED) return -1;
    uint64_t inode = inode_of(path);
    int failed = syscall(SYS_unlinkat, folder, name, flags);
    if (below(path)) note(kind, !failed, inode, 0, path, "", "", 0);
    return failed;
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int folder, const char *name, mode_t permissions) {
    char path[PATH_MAX];
    full_path(folder, name, path);
    if (below(path) && meet(MKDIR) == SPOILED) return -1;
    int failed = syscall(SYS_mkdirat, folder, name, permissions), reason = errno;
    if (below(path)) note(MKDIR, !failed, inode_of(path), 0, path, "", "", 0);
    errno = reason;
    return failed;
}
int mkdir(const char *path, mode_t permissions) { return mkdirat(AT_FDCWD, path, permissions); }
