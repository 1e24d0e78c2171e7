/*
 * Many connections by RDMA-CM at once: -n of them, some of them at the same time, each used once in both directions with bytes that are
 * checked, and ended by the client. Nothing may be refused, told twice or lost, whatever becomes of the connection manager's packets.
 */
#include <rdma/rdma_cma.h>

#include "pair.h"

enum { AT_ONCE = 64, BYTES = 16 };

/* How far a connection is. */
enum stage { NEW, ESTABLISHED, ANSWERED, ENDED, GONE };

struct connection {
	struct rdma_cm_id *id;
	uint64_t number;
	enum stage stage;
	/* What comes, and what goes. */
	uint8_t in[BYTES], out[BYTES];
};

static struct connection *connections;
static struct rdma_event_channel *channel;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static uint64_t begun, ended;

/* The first connection's device serves all of them. */
static void equip(struct connection *c, struct rdma_cm_id *id)
{
	struct ibv_sge sge = {(uintptr_t)c->in, BYTES, 0};
	struct ibv_recv_wr wr = {.wr_id = c->number, .sg_list = &sge, .num_sge = 1}, *bad;

	if (!pd) {
		pd = ibv_alloc_pd(id->verbs);
		CHECK(pd, "ibv_alloc_pd: %s", strerror(errno));
		cq = ibv_create_cq(id->verbs, 4 * (int)opt.count, NULL, NULL, 0);
		CHECK(cq, "ibv_create_cq: %s", strerror(errno));
		mr = ibv_reg_mr(pd, connections, opt.count * sizeof(*connections), IBV_ACCESS_LOCAL_WRITE);
		CHECK(mr, "ibv_reg_mr: %s", strerror(errno));
	}
	struct ibv_qp_init_attr attr = {
		.send_cq = cq, .recv_cq = cq, .cap = {2, 2, 1, 1, BYTES}, .sq_sig_all = 1, .qp_type = IBV_QPT_RC};

	c->id = id;
	id->context = c;
	CHECK(rdma_create_qp(id, pd, &attr) == 0, "rdma_create_qp: %s", strerror(errno));
	sge.lkey = mr->lkey;
	CHECK(ibv_post_recv(id->qp, &wr, &bad) == 0, "ibv_post_recv failed");
}

static void say(struct connection *c, uint64_t key)
{
	struct ibv_sge sge = {(uintptr_t)c->out, BYTES, mr->lkey};
	struct ibv_send_wr wr = {.wr_id = c->number, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;

	pattern(c->out, key, 0, BYTES);
	CHECK(ibv_post_send(c->id->qp, &wr, &bad) == 0, "ibv_post_send failed");
}

/* What the client says in a connection, and what the server answers. */
static uint64_t question(uint64_t number)
{
	return 2 * number;
}

static uint64_t answer(uint64_t number)
{
	return 2 * number + 1;
}

static void check_heard(struct connection *c, uint64_t key)
{
	uint8_t expected[BYTES];

	pattern(expected, key, 0, BYTES);
	CHECK(memcmp(c->in, expected, BYTES) == 0, "connection %" PRIu64 " brought other bytes", c->number);
}

static void put_away(struct connection *c)
{
	CHECK(c->stage == ENDED, "connection %" PRIu64 " ends in stage %d", c->number, c->stage);
	c->stage = GONE;
	rdma_destroy_qp(c->id);
	CHECK(rdma_destroy_id(c->id) == 0, "rdma_destroy_id: %s", strerror(errno));
	ended++;
}

static void begin(struct sockaddr *to)
{
	struct connection *c = &connections[begun];

	c->number = begun++;
	CHECK(rdma_create_id(channel, &c->id, c, RDMA_PS_TCP) == 0, "rdma_create_id: %s", strerror(errno));
	CHECK(rdma_resolve_addr(c->id, NULL, to, 2000) == 0, "rdma_resolve_addr: %s", strerror(errno));
}

/* The bytes of the connection have come. */
static void heard(struct connection *c)
{
	CHECK(c->stage <= ESTABLISHED, "connection %" PRIu64 " brings something in stage %d", c->number, c->stage);
	c->stage = ANSWERED;
	check_heard(c, is_client() ? answer(c->number) : question(c->number));
	if (is_client())
		CHECK(rdma_disconnect(c->id) == 0, "rdma_disconnect: %s", strerror(errno));
	else
		say(c, answer(c->number));
}

static void look_at_completions(void)
{
	struct ibv_wc wc;
	int n;

	while (cq && (n = ibv_poll_cq(cq, 1, &wc)) != 0) {
		CHECK(n == 1, "ibv_poll_cq: %d", n);
		CHECK(wc.wr_id < opt.count, "a completion of request %" PRIu64, wc.wr_id);
		struct connection *c = &connections[wc.wr_id];

		/* What is left when a connection ends is flushed. */
		if (wc.status == IBV_WC_WR_FLUSH_ERR && c->stage >= ANSWERED)
			continue;
		CHECK(wc.status == IBV_WC_SUCCESS, "connection %" PRIu64 ": %s", c->number, ibv_wc_status_str(wc.status));
		if (wc.opcode == IBV_WC_RECV)
			heard(c);
	}
}

static void client_event(struct rdma_cm_event *event, struct connection *c)
{
	struct rdma_conn_param param = {.private_data = &c->number, .private_data_len = sizeof(c->number), .retry_count = 7, .rnr_retry_count = 7};

	switch (event->event) {
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		CHECK(rdma_resolve_route(c->id, 2000) == 0, "rdma_resolve_route: %s", strerror(errno));
		break;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		equip(c, c->id);
		CHECK(rdma_connect(c->id, &param) == 0, "rdma_connect: %s", strerror(errno));
		break;
	case RDMA_CM_EVENT_ESTABLISHED:
		CHECK(c->stage == NEW, "connection %" PRIu64 " is established in stage %d", c->number, c->stage);
		c->stage = ESTABLISHED;
		say(c, question(c->number));
		break;
	default:
		die("connection %" PRIu64 ": %s (%d)", c->number, rdma_event_str(event->event), event->status);
	}
}

static struct connection *server_request(struct rdma_cm_event *event)
{
	struct rdma_conn_param param = {.retry_count = 7, .rnr_retry_count = 7};
	uint64_t number;

	CHECK(event->param.conn.private_data_len >= sizeof(number), "a request without its number");
	memcpy(&number, event->param.conn.private_data, sizeof(number));
	CHECK(number < opt.count, "a request has number %" PRIu64, number);
	struct connection *c = &connections[number];

	CHECK(!c->id, "connection %" PRIu64 " is asked for twice", number);
	c->number = number;
	begun++;
	equip(c, event->id);
	CHECK(rdma_accept(c->id, &param) == 0, "rdma_accept: %s", strerror(errno));
	return c;
}

/* Takes an event; gives the connection that it ends. */
static struct connection *take(struct rdma_cm_event *event)
{
	struct connection *c = event->id->context;

	if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
		server_request(event);
	} else if (event->event == RDMA_CM_EVENT_DISCONNECTED) {
		CHECK(c->stage == ANSWERED, "connection %" PRIu64 " is disconnected in stage %d", c->number, c->stage);
		c->stage = ENDED;
		return c;
	} else if (event->event == RDMA_CM_EVENT_TIMEWAIT_EXIT) {
		/* Of no interest. */
	} else if (is_client()) {
		client_event(event, c);
	} else {
		CHECK(event->event == RDMA_CM_EVENT_ESTABLISHED, "connection %" PRIu64 ": %s (%d)", c->number,
		      rdma_event_str(event->event), event->status);
		/* Its question may have come before. */
		if (c->stage == NEW)
			c->stage = ESTABLISHED;
	}
	return NULL;
}

static void look_at_events(void)
{
	struct pollfd polled = {channel->fd, POLLIN, 0};
	struct rdma_cm_event *event;

	/* Completions are looked at in between: they have no channel here. */
	for (int wait = 1; poll(&polled, 1, wait) > 0; wait = 0) {
		CHECK(rdma_get_cm_event(channel, &event) == 0, "rdma_get_cm_event: %s", strerror(errno));
		/* What came before the event must be seen before it. */
		look_at_completions();
		struct connection *over = take(event);

		CHECK(rdma_ack_cm_event(event) == 0, "rdma_ack_cm_event: %s", strerror(errno));
		if (over) {
			if (!is_client())
				CHECK(rdma_disconnect(over->id) == 0, "rdma_disconnect: %s", strerror(errno));
			put_away(over);
		}
	}
}

int main(int argc, char **argv)
{
	struct addrinfo hints = {.ai_flags = AI_PASSIVE}, *at;
	struct rdma_cm_id *listener = NULL;

	parse_options(argc, argv);
	CHECK(opt.count > 0, "-n is missing");
	connections = calloc(opt.count, sizeof(*connections));
	CHECK(connections, "no memory");
	hints.ai_family = opt.host ? AF_UNSPEC : AF_INET6;
	CHECK(getaddrinfo(opt.host, opt.port, &hints, &at) == 0, "no address %s", opt.host);
	channel = rdma_create_event_channel();
	CHECK(channel, "rdma_create_event_channel: %s", strerror(errno));
	if (!is_client()) {
		CHECK(rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) == 0, "rdma_create_id: %s", strerror(errno));
		CHECK(rdma_bind_addr(listener, at->ai_addr) == 0, "rdma_bind_addr: %s", strerror(errno));
		CHECK(rdma_listen(listener, AT_ONCE) == 0, "rdma_listen: %s", strerror(errno));
	}
	side_open();
	for (double idle = now_s(), last = 0; ended < opt.count;) {
		while (is_client() && begun < opt.count && begun - ended < AT_ONCE)
			begin(at->ai_addr);
		look_at_events();
		look_at_completions();
		if (last != (double)(begun + ended)) {
			last = (double)(begun + ended);
			idle = now_s();
		}
		CHECK(now_s() - idle < PATIENCE_S, "%" PRIu64 " of %" PRIu64 " connections ended, and nothing happens any more",
		      ended, opt.count);
	}
	barrier(1);
	if (listener)
		CHECK(rdma_destroy_id(listener) == 0, "rdma_destroy_id: %s", strerror(errno));
	CHECK(ibv_dereg_mr(mr) == 0 && ibv_destroy_cq(cq) == 0 && ibv_dealloc_pd(pd) == 0, "something is still in use");
	rdma_destroy_event_channel(channel);
	freeaddrinfo(at);
	printf("ok %" PRIu64 " connections\n", ended);
	return 0;
}
