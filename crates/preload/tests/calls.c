/* Looks at a folder of sysfs and at a device by every function that takes a path; prints the name of each that goes wrong. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define DIRECTORY "/sys/class/infiniband/soft0"
#define FILE_OF DIRECTORY "/node_type"
#define LINK_OF DIRECTORY "/link"
#define DEVICE "/dev/infiniband/soft0"

static int wrong;

static void check(int good, const char *what)
{
	if (!good) {
		printf("%s: %s\n", what, strerror(errno));
		wrong = 1;
	}
}

static int holds(int fd)
{
	char text[8] = {0};
	int good = fd >= 0 && read(fd, text, 5) == 5 && !strcmp(text, "1: CA");
	close(fd);
	return good;
}

static int streams(FILE *stream)
{
	char text[8] = {0};
	int good = stream && fgets(text, 6, stream) && !strcmp(text, "1: CA");
	if (stream)
		fclose(stream);
	return good;
}

static int is(char *path, const char *expected)
{
	int good = path && !strcmp(path, expected);
	if (!good)
		printf("got %s\n", path ? path : "NULL");
	return good;
}

int main(void)
{
	struct stat st;
	struct stat64 st64;
	struct statx stx;
	struct statfs fs;
	struct dirent **names;
	char buffer[PATH_MAX];

	check(holds(open(FILE_OF, O_RDONLY)), "open");
	check(holds(open64(FILE_OF, O_RDONLY)), "open64");
	check(holds(openat(AT_FDCWD, FILE_OF, O_RDONLY)), "openat");
	check(holds(openat64(-1, FILE_OF, O_RDONLY)), "openat64");
	check(streams(fopen(FILE_OF, "r")), "fopen");
	check(streams(fopen64(FILE_OF, "r")), "fopen64");
	check(streams(freopen(FILE_OF, "r", fopen("/dev/null", "r"))), "freopen");
	check(!stat(FILE_OF, &st) && st.st_size == 6, "stat");
	check(!stat64(FILE_OF, &st64) && st64.st_size == 6, "stat64");
	check(!lstat(LINK_OF, &st) && S_ISLNK(st.st_mode), "lstat");
	check(!lstat64(LINK_OF, &st64) && S_ISLNK(st64.st_mode), "lstat64");
	check(!fstatat(-1, FILE_OF, &st, 0) && st.st_size == 6, "fstatat");
	check(!fstatat64(-1, FILE_OF, &st64, 0) && st64.st_size == 6, "fstatat64");
	check(!statx(-1, FILE_OF, 0, STATX_SIZE, &stx) && stx.stx_size == 6, "statx");
	check(!access(FILE_OF, R_OK), "access");
	check(!eaccess(FILE_OF, R_OK), "eaccess");
	check(!euidaccess(FILE_OF, R_OK), "euidaccess");
	check(!faccessat(-1, FILE_OF, R_OK, 0), "faccessat");
	check(!statfs(DIRECTORY, &fs), "statfs");
	memset(buffer, 0, sizeof buffer);
	check(readlink(LINK_OF, buffer, sizeof buffer) == 9 && is(buffer, "node_type"), "readlink");
	check(readlinkat(-1, LINK_OF, buffer, sizeof buffer) == 9, "readlinkat");
	check(is(realpath(LINK_OF, buffer), FILE_OF), "realpath");
	check(is(realpath(LINK_OF, NULL), FILE_OF), "realpath NULL");
	check(is(canonicalize_file_name(LINK_OF), FILE_OF), "canonicalize_file_name");
	check(scandir("/sys/class/infiniband/", &names, NULL, alphasort) == 3 && !strcmp(names[2]->d_name, "soft0"), "scandir");
	DIR *dir = opendir("/sys/class/infiniband_verbs");
	check(dir && readdir(dir), "opendir");
	check(!chdir(DIRECTORY) && holds(open("node_type", O_RDONLY)), "chdir");

	/* A device as UCX wants it. */
	check(!stat(DEVICE, &st) && S_ISCHR(st.st_mode) && !access(DEVICE, R_OK | W_OK), "character device");
	int fd = open(DEVICE, O_RDWR);
	check(fd >= 0, "open the device");

	/* All else is what it was, and errors are as they were. */
	check(!stat("/sys/class", &st) && S_ISDIR(st.st_mode), "/sys/class");
	check(!access("/dev/null", R_OK) && !access("/proc/self/maps", R_OK), "other paths");
	check(open("/sys/class/infiniband_madness", O_RDONLY) < 0 && errno == ENOENT, "a name that only begins the same");
	check(access(DIRECTORY "/absent", R_OK) < 0 && errno == ENOENT, "an absent file");
	fd = open("made", O_CREAT | O_WRONLY, 0640);
	check(fd >= 0 && !fstat(fd, &st) && (st.st_mode & 0777) == (0640 & ~umask(0)), "the mode of a new file");
	char *longest = malloc(2 * PATH_MAX);
	memset(longest, 'x', 2 * PATH_MAX - 1);
	longest[2 * PATH_MAX - 1] = 0;
	memcpy(longest, DIRECTORY "/", sizeof DIRECTORY);
	check(access(longest, R_OK) < 0 && (errno == ENAMETOOLONG || errno == ENOENT), "a path that is too long");
	check(open(NULL, O_RDONLY) < 0 && errno == EFAULT, "NULL");
	if (!wrong)
		puts("ok");
	return wrong;
}
