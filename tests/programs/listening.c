// Waits until a port of RDMA-CM is taken: a server that is about to listen has it then. `listening ADDRESS PORT tcp|udp|ipoib`
#include <errno.h>
#include <netdb.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	if (argc != 4) {
		fprintf(stderr, "usage: listening ADDRESS PORT tcp|udp|ipoib\n");
		return 2;
	}
	struct addrinfo hints = { .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV }, *found;
	int error = getaddrinfo(argv[1], argv[2], &hints, &found);
	if (error) {
		fprintf(stderr, "%s: %s\n", argv[1], gai_strerror(error));
		return 1;
	}
	enum rdma_port_space space = RDMA_PS_TCP;
	if (!strcmp(argv[3], "udp"))
		space = RDMA_PS_UDP;
	if (!strcmp(argv[3], "ipoib"))
		space = RDMA_PS_IPOIB;
	struct rdma_event_channel *channel = rdma_create_event_channel();
	if (!channel) {
		perror("rdma_create_event_channel");
		return 1;
	}
	for (;;) {
		struct rdma_cm_id *id;
		if (rdma_create_id(channel, &id, NULL, space)) {
			perror("rdma_create_id");
			return 1;
		}
		int taken = rdma_bind_addr(id, found->ai_addr);
		// EADDRNOTAVAIL: by the wildcard.
		if (taken && errno != EADDRINUSE && errno != EADDRNOTAVAIL) {
			perror("rdma_bind_addr");
			return 1;
		}
		rdma_destroy_id(id);
		// Whoever has it calls rdma_listen next.
		usleep(taken ? 100000 : 20000);
		if (taken)
			break;
	}
	printf("ok\n");
	return 0;
}
