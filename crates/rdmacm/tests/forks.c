// A process forks while its threads make ids: children are refused what they inherit, make their own, and disturb nobody.
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define REFUSED(call)                                                                                              \
	do {                                                                                                       \
		errno = 0;                                                                                         \
		CHECK((call) == -1 && errno == EIO);                                                               \
	} while (0)

enum { FORKS = 50 };

static struct sockaddr_in loopback(void)
{
	struct sockaddr_in addr = { .sin_family = AF_INET };
	addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	return addr;
}

static void make_and_destroy(void)
{
	struct sockaddr_in any = loopback();
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *id;
	CHECK(channel && rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&any) == 0 && id->verbs);
	CHECK(rdma_listen(id, 1) == 0);
	CHECK(rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(channel);
}

static atomic_int over;

static void *busy(void *unused)
{
	while (!over)
		make_and_destroy();
	return unused;
}

static void child(struct rdma_event_channel *channel, struct rdma_cm_id *id, struct rdma_cm_event *event)
{
	struct sockaddr_in to = loopback();
	struct rdma_cm_event *none;
	struct rdma_conn_param param = { 0 };
	struct rdma_cm_id *fresh;
	struct ibv_qp_init_attr attr = { .qp_type = IBV_QPT_RC };
	REFUSED(rdma_get_cm_event(channel, &none));
	REFUSED(rdma_create_id(channel, &fresh, NULL, RDMA_PS_TCP));
	REFUSED(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 1000));
	REFUSED(rdma_create_qp(id, NULL, &attr));
	REFUSED(rdma_connect(id, &param));
	REFUSED(rdma_listen(id, 1));
	REFUSED(rdma_ack_cm_event(event));
	REFUSED(rdma_destroy_id(id));
	rdma_destroy_event_channel(channel);
	make_and_destroy();
	exit(0);
}

int main(void)
{
	struct sockaddr_in to = loopback();
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *id;
	struct rdma_cm_event *event;
	CHECK(channel && rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 1000) == 0);
	CHECK(rdma_get_cm_event(channel, &event) == 0 && event->event == RDMA_CM_EVENT_ADDR_RESOLVED);

	pthread_t threads[2];
	for (int i = 0; i < 2; i++)
		CHECK(pthread_create(&threads[i], NULL, busy, NULL) == 0);
	for (int i = 0; i < FORKS; i++) {
		int status;
		pid_t pid = fork();
		CHECK(pid >= 0);
		if (pid == 0)
			child(channel, id, event);
		CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	}
	over = 1;
	for (int i = 0; i < 2; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);

	// No child has made or taken an event.
	struct pollfd polled = { .fd = channel->fd, .events = POLLIN };
	CHECK(poll(&polled, 1, 0) == 0);
	CHECK(rdma_ack_cm_event(event) == 0);
	CHECK(rdma_resolve_route(id, 1000) == 0);
	CHECK(poll(&polled, 1, 5000) == 1 && rdma_get_cm_event(channel, &event) == 0);
	CHECK(event->event == RDMA_CM_EVENT_ROUTE_RESOLVED && rdma_ack_cm_event(event) == 0);
	CHECK(rdma_destroy_id(id) == 0);
	rdma_destroy_event_channel(channel);
	puts("good");
	return 0;
}
