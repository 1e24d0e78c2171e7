// One process, both ends of connections over loopback: synchronous ids and event channels, private data, rejection, refusals.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"

static const char PORT[] = "7471";

static struct ibv_qp_init_attr wanted(void)
{
	struct ibv_qp_init_attr attr = { .cap = { 4, 4, 1, 1, 0 }, .sq_sig_all = 1 };
	return attr;
}

static struct rdma_addrinfo *resolve(int flags)
{
	struct rdma_addrinfo hints = { .ai_flags = flags, .ai_port_space = RDMA_PS_TCP }, *found;
	CHECK(rdma_getaddrinfo("127.0.0.1", PORT, &hints, &found) == 0);
	return found;
}

// The passive end with synchronous ids: takes one request, answers a message.
static void *answer(void *listener)
{
	struct rdma_cm_id *id;
	char text[16];
	struct ibv_wc wc;
	CHECK(rdma_get_request(listener, &id) == 0);
	CHECK(id->event->listen_id == listener && id->verbs && id->pd && id->port_num == 1 && id->qp);
	CHECK(id->event->param.conn.private_data_len == 56 && !strcmp(id->event->param.conn.private_data, "hello"));
	struct ibv_mr *mr = rdma_reg_msgs(id, text, sizeof text);
	CHECK(mr && rdma_post_recv(id, NULL, text, sizeof text, mr) == 0);
	struct rdma_conn_param param = { .private_data = "welcome", .private_data_len = 8, .responder_resources = 2, .initiator_depth = 2, .rnr_retry_count = 3 };
	CHECK(rdma_accept(id, &param) == 0);
	CHECK(rdma_get_recv_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS && !strcmp(text, "ping"));
	CHECK(rdma_post_send(id, NULL, "pong", 5, NULL, IBV_SEND_INLINE) == 0);
	CHECK(rdma_get_send_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	// The peer sends at once, and has three retries. They were used up in 2 ms once.
	usleep(100000);
	CHECK(rdma_post_recv(id, NULL, text, sizeof text, mr) == 0);
	CHECK(rdma_get_recv_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS && !strcmp(text, "late"));
	rdma_disconnect(id);
	CHECK(rdma_dereg_mr(mr) == 0);
	rdma_destroy_ep(id);
	return NULL;
}

static void synchronous(void)
{
	struct rdma_addrinfo *passive = resolve(RAI_PASSIVE), *active = resolve(0);
	struct rdma_cm_id *listener, *id;
	struct ibv_qp_init_attr attr = wanted();
	CHECK(rdma_create_ep(&listener, passive, NULL, &attr) == 0);
	CHECK(rdma_listen(listener, 0) == 0);
	CHECK(ntohs(rdma_get_src_port(listener)) == 7471);
	pthread_t thread;
	CHECK(pthread_create(&thread, NULL, answer, listener) == 0);

	attr = wanted();
	CHECK(rdma_create_ep(&id, active, NULL, &attr) == 0);
	CHECK(id->qp && id->route.num_paths == 1 && ntohs(rdma_get_dst_port(id)) == 7471);
	char text[16];
	struct ibv_wc wc;
	struct ibv_mr *mr = rdma_reg_msgs(id, text, sizeof text);
	CHECK(mr && rdma_post_recv(id, NULL, text, sizeof text, mr) == 0);
	struct rdma_conn_param param = { .private_data = "hello", .private_data_len = 6, .responder_resources = 2, .initiator_depth = 2, .retry_count = 7, .rnr_retry_count = 7 };
	CHECK(rdma_connect(id, &param) == 0);
	CHECK(id->event->event == RDMA_CM_EVENT_ESTABLISHED && !strcmp(id->event->param.conn.private_data, "welcome"));
	CHECK(rdma_post_send(id, NULL, "ping", 5, NULL, IBV_SEND_INLINE) == 0);
	CHECK(rdma_get_send_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	CHECK(rdma_get_recv_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS && !strcmp(text, "pong"));
	CHECK(rdma_post_send(id, NULL, "late", 5, NULL, IBV_SEND_INLINE) == 0);
	CHECK(rdma_get_send_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	rdma_disconnect(id);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(rdma_dereg_mr(mr) == 0);
	rdma_destroy_ep(id);
	rdma_destroy_ep(listener);

	// Nobody listens any more.
	attr = wanted();
	CHECK(rdma_create_ep(&id, active, NULL, &attr) == 0);
	CHECK(rdma_connect(id, &param) == -1 && errno == ECONNREFUSED && id->event->status == 8);
	rdma_destroy_ep(id);
	rdma_freeaddrinfo(passive);
	rdma_freeaddrinfo(active);
}

static struct rdma_cm_event *next(struct rdma_event_channel *channel, enum rdma_cm_event_type type)
{
	struct pollfd polled = { channel->fd, POLLIN, 0 };
	struct rdma_cm_event *event;
	CHECK(poll(&polled, 1, 60000) == 1);
	CHECK(rdma_get_cm_event(channel, &event) == 0);
	if (event->event != type) {
		printf("%s (%d) instead of %s\n", rdma_event_str(event->event), event->status, rdma_event_str(type));
		exit(1);
	}
	return event;
}

// Both ends on one channel that does not block, with a rejection that says why.
static void rejected(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel(), *other = rdma_create_event_channel();
	CHECK(channel && other && fcntl(channel->fd, F_SETFL, O_NONBLOCK) == 0);
	struct rdma_cm_event *event;
	CHECK(rdma_get_cm_event(channel, &event) == -1 && errno == EAGAIN);

	struct sockaddr_in to = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
	struct rdma_cm_id *listener, *second, *id;
	CHECK(rdma_create_id(channel, &listener, &to, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(listener, (struct sockaddr *)&to) == 0 && rdma_listen(listener, 3) == 0);
	to.sin_port = rdma_get_src_port(listener);
	CHECK(to.sin_port);
	CHECK(rdma_create_id(channel, &second, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(second, (struct sockaddr *)&to) == -1 && errno == EADDRINUSE);
	CHECK(rdma_destroy_id(second) == 0);

	CHECK(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 1000) == 0);
	// The event goes with the id.
	CHECK(rdma_migrate_id(id, other) == 0 && id->channel == other);
	CHECK(rdma_get_cm_event(channel, &event) == -1 && errno == EAGAIN);
	event = next(other, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(event->id == id && rdma_ack_cm_event(event) == 0);
	CHECK(rdma_resolve_route(id, 1000) == 0);
	CHECK(rdma_ack_cm_event(next(other, RDMA_CM_EVENT_ROUTE_RESOLVED)) == 0);
	struct ibv_qp_init_attr attr = wanted();
	attr.qp_type = IBV_QPT_UD;
	CHECK(rdma_create_qp(id, NULL, &attr) == -1 && errno == EINVAL);
	attr.qp_type = IBV_QPT_RC;
	CHECK(rdma_create_qp(id, NULL, &attr) == 0 && id->qp->state == IBV_QPS_INIT);
	CHECK(rdma_connect(id, NULL) == 0);
	event = next(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	struct rdma_cm_id *request = event->id;
	CHECK(event->listen_id == listener && request->context == &to);
	CHECK(rdma_reject(request, "no", 3) == 0);
	CHECK(rdma_ack_cm_event(event) == 0 && rdma_destroy_id(request) == 0);
	event = next(other, RDMA_CM_EVENT_REJECTED);
	CHECK(event->status == 28 && !strcmp(event->param.conn.private_data, "no") && id->qp->state == IBV_QPS_ERR);
	CHECK(rdma_ack_cm_event(event) == 0);
	rdma_destroy_qp(id);
	CHECK(rdma_destroy_id(id) == 0 && rdma_destroy_id(listener) == 0);
	rdma_destroy_event_channel(channel);
	rdma_destroy_event_channel(other);
}

static int is_readable(struct rdma_event_channel *channel)
{
	struct pollfd polled = { channel->fd, POLLIN, 0 };
	return poll(&polled, 1, 0);
}

// What a destroyed id was not told of makes nobody believe that there is an event.
static void unread(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	CHECK(channel && fcntl(channel->fd, F_SETFL, O_NONBLOCK) == 0);
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
	struct rdma_cm_id *listener, *ids[3];
	CHECK(rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(listener, (struct sockaddr *)&to) == 0 && rdma_listen(listener, 3) == 0);
	to.sin_port = rdma_get_src_port(listener);
	for (int i = 0; i < 3; i++) {
		CHECK(rdma_create_id(channel, &ids[i], NULL, RDMA_PS_TCP) == 0);
		CHECK(rdma_resolve_addr(ids[i], NULL, (struct sockaddr *)&to, 1000) == 0);
	}
	CHECK(rdma_destroy_id(ids[0]) == 0 && is_readable(channel));
	// Behind an event that is read.
	CHECK(rdma_destroy_id(ids[2]) == 0 && is_readable(channel));
	struct rdma_cm_event *event = next(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(event->id == ids[1] && rdma_ack_cm_event(event) == 0);
	CHECK(!is_readable(channel));
	// What comes from the service.
	CHECK(rdma_resolve_route(ids[1], 1000) == 0);
	CHECK(rdma_ack_cm_event(next(channel, RDMA_CM_EVENT_ROUTE_RESOLVED)) == 0);
	struct ibv_qp_init_attr attr = wanted();
	attr.qp_type = IBV_QPT_RC;
	CHECK(rdma_create_qp(ids[1], NULL, &attr) == 0 && rdma_connect(ids[1], NULL) == 0);
	struct pollfd polled = { channel->fd, POLLIN, 0 };
	CHECK(poll(&polled, 1, 60000) == 1);
	CHECK(rdma_destroy_id(listener) == 0);
	// Its request was refused, which the other end is told.
	CHECK(rdma_ack_cm_event(next(channel, RDMA_CM_EVENT_REJECTED)) == 0);
	CHECK(!is_readable(channel));
	rdma_destroy_qp(ids[1]);
	CHECK(rdma_destroy_id(ids[1]) == 0);
	rdma_destroy_event_channel(channel);
}

// Nor does it when the event before it leaves with its id.
static void left_behind(void)
{
	struct rdma_event_channel *channel = rdma_create_event_channel(), *other = rdma_create_event_channel();
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) }, .sin_port = htons(1) };
	struct rdma_cm_id *ids[2];
	CHECK(channel && other);
	for (int i = 0; i < 2; i++) {
		CHECK(rdma_create_id(channel, &ids[i], NULL, RDMA_PS_TCP) == 0);
		CHECK(rdma_resolve_addr(ids[i], NULL, (struct sockaddr *)&to, 1000) == 0);
	}
	CHECK(rdma_destroy_id(ids[1]) == 0 && is_readable(channel));
	CHECK(rdma_migrate_id(ids[0], other) == 0 && !is_readable(channel));
	struct rdma_cm_event *event = next(other, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(event->id == ids[0] && rdma_ack_cm_event(event) == 0);
	CHECK(rdma_destroy_id(ids[0]) == 0 && !is_readable(other));
	rdma_destroy_event_channel(channel);
	rdma_destroy_event_channel(other);
}

static void refused(void)
{
	struct sockaddr_in nowhere = { .sin_family = AF_INET, .sin_addr = { htonl(0xcb007101) } };
	struct rdma_cm_id *id;
	CHECK(rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP) == 0);
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&nowhere) == -1 && errno == ENODEV);
	CHECK(rdma_connect(id, NULL) == -1 && errno == EINVAL);
	CHECK(rdma_resolve_route(id, 1) == -1 && errno == EINVAL);
	CHECK(rdma_join_multicast(id, (struct sockaddr *)&nowhere, NULL) == -1 && errno == EINVAL);
	CHECK(rdma_destroy_id(id) == 0);
	CHECK(rdma_create_id(NULL, &id, NULL, 77) == -1 && errno == EPROTONOSUPPORT);
	CHECK(rdma_destroy_id(NULL) == -1 && errno == EINVAL);
	CHECK(!strcmp(rdma_event_str(RDMA_CM_EVENT_TIMEWAIT_EXIT), "RDMA_CM_EVENT_TIMEWAIT_EXIT"));
	int count;
	struct ibv_context **devices = rdma_get_devices(&count);
	CHECK(devices && count > 0 && !devices[count]);
	rdma_free_devices(devices);
}

int main(void)
{
	synchronous();
	rejected();
	unread();
	left_behind();
	refused();
	printf("good\n");
	return 0;
}
