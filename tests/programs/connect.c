/*
 * Connections by RDMA-CM that do not come about, or end: refused where nobody listens, rejected and accepted with private data, ended
 * by either end; the same for datagrams. Both ends go through the same cases; what they see they print in lines that start with "saw":
 * the same whoever the two ends are.
 *
 *   connect -p PORT [--mode death -n SIGNAL_PORT] [SERVER_ADDRESS]
 *
 * Without an address it is the server, which listens on TCP port PORT when clients may come. With --mode death the server is ended by
 * kill -9 while it is connected; the client listens on TCP port SIGNAL_PORT when it may be.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <netdb.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PATIENCE_MS 100000
#define REJECT_BYTES 148 /* most that a REJ has room for, and so on */
#define REPLY_BYTES 196
#define REFUSE_DATAGRAM_BYTES 136

#define CHECK(good, ...)                                                                                                               \
	do {                                                                                                                           \
		if (!(good)) {                                                                                                         \
			fprintf(stderr, __VA_ARGS__);                                                                                  \
			fprintf(stderr, " (line %d: %s)\n", __LINE__, strerror(errno));                                                \
			exit(1);                                                                                                       \
		}                                                                                                                      \
	} while (0)

static struct rdma_event_channel *channel;
static uint16_t port;
static struct sockaddr_storage server_address;
static bool is_client;

struct end {
	struct rdma_cm_id *id;
	struct ibv_cq *cq;
};

static uint8_t pattern(unsigned i)
{
	return (uint8_t)(0x31 + 7 * i);
}

static const uint8_t *patterned(void)
{
	static uint8_t bytes[256];

	for (unsigned i = 0; i < sizeof(bytes); i++)
		bytes[i] = pattern(i);
	return bytes;
}

/* What private data is: a word, the pattern, or nothing. */
static void describe(const uint8_t *data, unsigned len)
{
	unsigned right = 0;

	while (right < len && data[right] == pattern(right))
		right++;
	if (right > 0)
		printf(", %u bytes of private data, %u as sent", len, right);
	else if (len > 0 && data[0] != 0)
		printf(", %u bytes of private data: %.20s", len, (const char *)data);
	else
		printf(", %u bytes of private data", len);
}

/* The next event, which must be this one. That a connection may be forgotten now is told at any time. */
static struct rdma_cm_event *await(enum rdma_cm_event_type type)
{
	struct pollfd polled = {channel->fd, POLLIN, 0};
	struct rdma_cm_event *event;

	for (;;) {
		CHECK(poll(&polled, 1, PATIENCE_MS) == 1, "no %s came", rdma_event_str(type));
		CHECK(rdma_get_cm_event(channel, &event) == 0, "rdma_get_cm_event");
		if (event->event != RDMA_CM_EVENT_TIMEWAIT_EXIT)
			break;
		rdma_ack_cm_event(event);
	}
	CHECK(event->event == type, "%s (%d) came, not %s", rdma_event_str(event->event), event->status, rdma_event_str(type));
	return event;
}

/* The same, told; gives its id. */
static struct rdma_cm_id *saw(enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event = await(type);
	struct rdma_cm_id *id = event->id;

	printf("saw %s, status %d", rdma_event_str(type), event->status);
	if (id->ps == RDMA_PS_UDP)
		describe(event->param.ud.private_data, event->param.ud.private_data_len);
	else if (type != RDMA_CM_EVENT_DISCONNECTED)
		describe(event->param.conn.private_data, event->param.conn.private_data_len);
	if (type == RDMA_CM_EVENT_ESTABLISHED && id->ps == RDMA_PS_UDP)
		printf(", Q_Key %#x", event->param.ud.qkey);
	printf("\n");
	CHECK(rdma_ack_cm_event(event) == 0, "rdma_ack_cm_event");
	return id;
}

static struct end with_queue_pair(struct rdma_cm_id *id)
{
	struct end end = {id, ibv_create_cq(id->verbs, 8, NULL, NULL, 0)};
	struct ibv_qp_init_attr attr = {.cap = {4, 4, 1, 1, 0}, .send_cq = end.cq, .recv_cq = end.cq};
	struct ibv_recv_wr wr = {.wr_id = 1}, *bad;

	attr.qp_type = id->ps == RDMA_PS_UDP ? IBV_QPT_UD : IBV_QPT_RC;
	CHECK(end.cq && rdma_create_qp(id, NULL, &attr) == 0, "no queue pair");
	CHECK(ibv_post_recv(id->qp, &wr, &bad) == 0, "ibv_post_recv");
	return end;
}

static void tell_state(const struct end *end)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	CHECK(ibv_query_qp(end->id->qp, &attr, IBV_QP_STATE, &init) == 0, "ibv_query_qp");
	printf("saw the queue pair in state %d\n", attr.qp_state);
}

static void tell_flushed(const struct end *end)
{
	struct ibv_wc wc;
	int n = 0;

	for (int waited_ms = 0; waited_ms < PATIENCE_MS && n == 0; waited_ms++) {
		n = ibv_poll_cq(end->cq, 1, &wc);
		if (n == 0)
			usleep(1000);
	}
	CHECK(n == 1, "the receive did not complete: %d", n);
	printf("saw the receive: %s\n", ibv_wc_status_str(wc.status));
}

static void destroy(struct end *end)
{
	rdma_destroy_qp(end->id);
	CHECK(ibv_destroy_cq(end->cq) == 0, "ibv_destroy_cq");
	CHECK(rdma_destroy_id(end->id) == 0, "rdma_destroy_id");
}

/* The client's end, when the way to the server is known. */
static struct end resolved(enum rdma_port_space space, unsigned to_port)
{
	struct sockaddr_storage to = server_address;
	struct rdma_cm_id *id;

	/* Both families have it at the same place. */
	((struct sockaddr_in *)&to)->sin_port = htons((uint16_t)to_port);
	CHECK(rdma_create_id(channel, &id, NULL, space) == 0, "rdma_create_id");
	CHECK(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 2000) == 0, "rdma_resolve_addr");
	rdma_ack_cm_event(await(RDMA_CM_EVENT_ADDR_RESOLVED));
	CHECK(rdma_resolve_route(id, 2000) == 0, "rdma_resolve_route");
	rdma_ack_cm_event(await(RDMA_CM_EVENT_ROUTE_RESOLVED));
	return with_queue_pair(id);
}

static struct end connecting(enum rdma_port_space space, unsigned to_port, const char *word)
{
	struct end end = resolved(space, to_port);
	struct rdma_conn_param param = {.private_data = word, .private_data_len = (uint8_t)(strlen(word) + 1)};

	param.responder_resources = param.initiator_depth = 1;
	param.retry_count = param.rnr_retry_count = 7;
	CHECK(rdma_connect(end.id, &param) == 0, "rdma_connect");
	return end;
}

static void accept_with_data(struct end *end, unsigned bytes)
{
	struct rdma_conn_param param = {.private_data = patterned(), .private_data_len = (uint8_t)bytes};

	param.responder_resources = param.initiator_depth = 1;
	param.rnr_retry_count = 7;
	param.qp_num = end->id->qp->qp_num;
	CHECK(rdma_accept(end->id, &param) == 0, "rdma_accept");
}

static void disconnect(struct end *end)
{
	CHECK(rdma_disconnect(end->id) == 0, "rdma_disconnect");
}

/* The end that hears of it answers. */
static void hear_of_the_end(struct end *end)
{
	saw(RDMA_CM_EVENT_DISCONNECTED);
	disconnect(end);
	tell_state(end);
	tell_flushed(end);
	destroy(end);
}

static void end_it(struct end *end)
{
	disconnect(end);
	saw(RDMA_CM_EVENT_DISCONNECTED);
	tell_state(end);
	tell_flushed(end);
	destroy(end);
}

static void nobody_listens(void)
{
	struct end end;

	if (!is_client)
		return;
	end = connecting(RDMA_PS_TCP, port + 1, "nobody");
	saw(RDMA_CM_EVENT_REJECTED);
	tell_state(&end);
	destroy(&end);
}

static void rejected(void)
{
	struct end end;
	struct rdma_cm_id *request;

	if (is_client) {
		end = connecting(RDMA_PS_TCP, port, "reject");
		saw(RDMA_CM_EVENT_REJECTED);
		tell_state(&end);
		destroy(&end);
		return;
	}
	request = saw(RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(rdma_reject(request, patterned(), REJECT_BYTES) == 0, "rdma_reject");
	CHECK(rdma_destroy_id(request) == 0, "rdma_destroy_id");
}

/* A request is not answered: its id is destroyed. */
static void given_up(void)
{
	struct end end;

	if (is_client) {
		end = connecting(RDMA_PS_TCP, port, "give up");
		saw(RDMA_CM_EVENT_REJECTED);
		tell_state(&end);
		destroy(&end);
		return;
	}
	CHECK(rdma_destroy_id(saw(RDMA_CM_EVENT_CONNECT_REQUEST)) == 0, "rdma_destroy_id");
}

static struct end established(const char *word)
{
	struct end end;

	if (is_client) {
		end = connecting(RDMA_PS_TCP, port, word);
	} else {
		end = with_queue_pair(saw(RDMA_CM_EVENT_CONNECT_REQUEST));
		accept_with_data(&end, REPLY_BYTES);
	}
	saw(RDMA_CM_EVENT_ESTABLISHED);
	return end;
}

static void ended_by_client(void)
{
	struct end end = established("end");

	if (is_client)
		end_it(&end);
	else
		hear_of_the_end(&end);
}

static void ended_by_server(void)
{
	struct end end = established("be ended");

	if (is_client)
		hear_of_the_end(&end);
	else
		end_it(&end);
}

static void datagrams_where_nobody_listens(void)
{
	struct end end;

	if (!is_client)
		return;
	end = connecting(RDMA_PS_UDP, port + 1, "nobody");
	saw(RDMA_CM_EVENT_UNREACHABLE);
	destroy(&end);
}

static void datagrams_rejected(void)
{
	struct end end;
	struct rdma_cm_id *request;

	if (is_client) {
		end = connecting(RDMA_PS_UDP, port, "reject");
		saw(RDMA_CM_EVENT_UNREACHABLE);
		destroy(&end);
		return;
	}
	request = saw(RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(rdma_reject(request, patterned(), REFUSE_DATAGRAM_BYTES) == 0, "rdma_reject");
	CHECK(rdma_destroy_id(request) == 0, "rdma_destroy_id");
}

static void datagrams_accepted(void)
{
	struct end end;

	if (is_client) {
		end = connecting(RDMA_PS_UDP, port, "accept");
		saw(RDMA_CM_EVENT_ESTABLISHED);
	} else {
		end = with_queue_pair(saw(RDMA_CM_EVENT_CONNECT_REQUEST));
		accept_with_data(&end, REFUSE_DATAGRAM_BYTES);
	}
	tell_state(&end);
	if (is_client)
		destroy(&end);
}

static struct rdma_cm_id *listener(enum rdma_port_space space)
{
	struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = in6addr_any};
	struct rdma_cm_id *id;

	CHECK(rdma_create_id(channel, &id, NULL, space) == 0, "rdma_create_id");
	CHECK(rdma_bind_addr(id, (struct sockaddr *)&any) == 0 && rdma_listen(id, 4) == 0, "cannot listen on port %u", port);
	return id;
}

/* Tells a harness on either side of the wire that it may go on. */
static void announce(uint16_t on)
{
	struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_port = htons(on), .sin6_addr = in6addr_any};
	int s = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(s >= 0 && bind(s, (struct sockaddr *)&any, sizeof(any)) == 0 && listen(s, 1) == 0, "TCP port %u", on);
}

static void death(uint16_t signal_port)
{
	struct end end = established("wait for the end");

	if (!is_client) {
		pause();
		return;
	}
	announce(signal_port);
	hear_of_the_end(&end);
}

static void cases(void)
{
	nobody_listens();
	rejected();
	given_up();
	ended_by_client();
	ended_by_server();
	datagrams_where_nobody_listens();
	datagrams_rejected();
	datagrams_accepted();
}

static void read_options(int argc, char **argv, uint16_t *signal_port)
{
	static const struct option known[] = {{"mode", required_argument, NULL, 'm'}, {0}};
	struct addrinfo hints = {.ai_flags = AI_NUMERICHOST}, *found;
	bool dies = false;
	int option;

	while ((option = getopt_long(argc, argv, "p:n:", known, NULL)) != -1) {
		switch (option) {
		case 'p':
			port = (uint16_t)atoi(optarg);
			break;
		case 'n':
			*signal_port = (uint16_t)atoi(optarg);
			break;
		case 'm':
			dies = strcmp(optarg, "death") == 0;
			CHECK(dies, "there is no mode %s", optarg);
			break;
		default:
			exit(2);
		}
	}
	CHECK(port != 0 && dies == (*signal_port != 0), "usage: connect -p PORT [--mode death -n SIGNAL_PORT] [SERVER_ADDRESS]");
	is_client = optind < argc;
	if (!is_client)
		return;
	CHECK(getaddrinfo(argv[optind], NULL, &hints, &found) == 0, "%s is no address", argv[optind]);
	memcpy(&server_address, found->ai_addr, found->ai_addrlen);
	freeaddrinfo(found);
}

int main(int argc, char **argv)
{
	struct rdma_cm_id *listeners[2] = {NULL, NULL};
	uint16_t signal_port = 0;

	read_options(argc, argv, &signal_port);
	setvbuf(stdout, NULL, _IOLBF, 0);
	channel = rdma_create_event_channel();
	CHECK(channel, "rdma_create_event_channel");
	if (!is_client) {
		listeners[0] = listener(RDMA_PS_TCP);
		listeners[1] = listener(RDMA_PS_UDP);
		announce(port);
	}
	if (signal_port)
		death(signal_port);
	else
		cases();
	if (!is_client)
		CHECK(rdma_destroy_id(listeners[0]) == 0 && rdma_destroy_id(listeners[1]) == 0, "rdma_destroy_id");
	printf("ok %s\n", is_client ? "client" : "server");
	return 0;
}
