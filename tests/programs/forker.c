// A server of TCP that forks for each client, and its client; nothing here knows RDMA. Over librdmacm's preload library with fork support
// the children's connections become rsockets, which an option of rsockets proves.
#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CLIENTS = 2, ROUNDS = 50, SIZE = 20000 };

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static void check_rsocket(int fd)
{
	const int sol_rdma = 0x10000, rdma_sqsize = 0;
	int size = 0;
	socklen_t len = sizeof size;
	if (getsockopt(fd, sol_rdma, rdma_sqsize, &size, &len) || size <= 0)
		die("this is no rsocket");
}

static void read_all(int fd, char *buffer, size_t left)
{
	while (left) {
		ssize_t n = read(fd, buffer, left);
		if (n <= 0)
			die("read");
		buffer += n;
		left -= n;
	}
}

static void write_all(int fd, const char *buffer, size_t left)
{
	while (left) {
		ssize_t n = write(fd, buffer, left);
		if (n <= 0)
			die("write");
		buffer += n;
		left -= n;
	}
}

static void serve(int fd)
{
	static char buffer[SIZE];
	for (int round = 0; round < ROUNDS; round++) {
		read_all(fd, buffer, SIZE);
		write_all(fd, buffer, SIZE);
	}
	check_rsocket(fd);
	if (read(fd, buffer, 1) != 0)
		die("the end");
	close(fd);
}

static void ask(int fd)
{
	static char sent[SIZE], echoed[SIZE];
	for (int round = 0; round < ROUNDS; round++) {
		for (int i = 0; i < SIZE; i++)
			sent[i] = (char)(i * 31 + round);
		write_all(fd, sent, SIZE);
		read_all(fd, echoed, SIZE);
		if (memcmp(sent, echoed, SIZE)) {
			fprintf(stderr, "round %d differs\n", round);
			exit(1);
		}
	}
	check_rsocket(fd);
	close(fd);
}

int main(int argc, char **argv)
{
	const char *port = NULL;
	for (int option; (option = getopt(argc, argv, "p:")) != -1;)
		if (option == 'p')
			port = optarg;
	const char *to = argv[optind];
	struct addrinfo hints = { .ai_flags = AI_NUMERICHOST | (to ? 0 : AI_PASSIVE), .ai_family = AF_INET, .ai_socktype = SOCK_STREAM }, *found;
	if (!port || getaddrinfo(to, port, &hints, &found))
		die("usage: forker -p PORT [ADDRESS]");
	if (to) {
		for (int client = 0; client < CLIENTS; client++) {
			int fd = socket(AF_INET, SOCK_STREAM, 0);
			if (fd < 0 || connect(fd, found->ai_addr, found->ai_addrlen))
				die("connect");
			ask(fd);
		}
		puts("ok");
		return 0;
	}
	int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
	if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one))
		die("socket");
	if (bind(fd, found->ai_addr, found->ai_addrlen) || listen(fd, CLIENTS))
		die("listen");
	for (int client = 0; client < CLIENTS; client++) {
		int accepted = accept(fd, NULL, NULL);
		if (accepted < 0)
			die("accept");
		pid_t child = fork();
		if (child < 0)
			die("fork");
		if (!child) {
			close(fd);
			serve(accepted);
			_exit(0);
		}
		close(accepted);
	}
	int good = 1, status;
	while (wait(&status) > 0)
		good &= WIFEXITED(status) && WEXITSTATUS(status) == 0;
	if (good)
		puts("ok");
	return !good;
}
