/*
 * What the specification says of requests that may not be: the status at the requester, the event, the state and the
 * receives at the responder, and not one byte touched.
 */
#include "pair.h"

#define SIZE 65536u
#define EDGE 4096u /* between the registered pages and those around them */

/* Regions of the server, all over pages of one mapping. */
enum region { ALL, READ_ONLY, WRITE_ONLY, NO_REMOTE, FREED, OTHER_PD, REGIONS };

enum what { WRITE, READ, ADD, SEND };
static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_SEND};

/* How the client's own memory is wrong. */
enum own { FINE, BAD_LKEY, NO_LOCAL_WRITE, TOO_LONG, OWN_OTHER_PD, OWN_FREED };

/* How the server's receive is wrong. */
enum receive { GOOD, SHORT, ABSENT, RECV_BAD_LKEY, RECV_NO_LOCAL_WRITE };

struct trial {
	const char *name;
	enum what what;
	enum region region;
	uint32_t key_change; /* xor to the rkey */
	int32_t offset;
	uint32_t length;
	int qp_access; /* access flags of the server's QP */
	enum own own;
	enum receive receive;
	enum ibv_wc_status status;      /* at the client */
	enum ibv_event_type event;      /* at the server; -1: none is asked for */
	bool peer_fails;                /* the server's QP goes to ERR */
	enum ibv_wc_status recv_status; /* of the server's first receive where the peer fails */
};

#define QP_ALL (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)
#define NO_EVENT ((enum ibv_event_type) - 1)
#define ACCESS(name, what, region, key, offset, length)                                                                \
	{name, what, region, key, offset, length, QP_ALL, FINE, GOOD, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR, true, IBV_WC_WR_FLUSH_ERR}
#define REQUEST(name, what, offset, qp_access)                                                                         \
	{name, what, ALL, 0, offset, 8, qp_access, FINE, GOOD, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR, true, IBV_WC_WR_FLUSH_ERR}
#define LOCAL(name, what, own) {name, what, ALL, 0, 0, 8, QP_ALL, own, GOOD, IBV_WC_LOC_PROT_ERR, NO_EVENT, false, IBV_WC_WR_FLUSH_ERR}

static const struct trial trials[] = {
	ACCESS("wrong rkey, WRITE", WRITE, ALL, 0x5a, 0, 100),
	ACCESS("wrong rkey, READ", READ, ALL, 0x5a, 0, 100),
	ACCESS("wrong rkey, FAA", ADD, ALL, 0x5a, 0, 8),
	ACCESS("wrong rkey of another index, WRITE", WRITE, ALL, 0x5a00, 0, 100),
	ACCESS("rkey with all bits wrong, READ", READ, ALL, 0xffffffff, 0, 100),
	ACCESS("one byte too long, WRITE", WRITE, ALL, 0, 0, SIZE + 1),
	ACCESS("one byte too long, READ", READ, ALL, 0, 0, SIZE + 1),
	ACCESS("the last byte and one more, WRITE", WRITE, ALL, 0, SIZE - 1, 2),
	ACCESS("behind the end, FAA", ADD, ALL, 0, SIZE, 8),
	ACCESS("one byte before the start, WRITE", WRITE, ALL, 0, -1, 100),
	ACCESS("before the start, READ", READ, ALL, 0, -8, 8),
	ACCESS("wrong PD, WRITE", WRITE, OTHER_PD, 0, 0, 100),
	ACCESS("wrong PD, READ", READ, OTHER_PD, 0, 0, 100),
	ACCESS("wrong PD, FAA", ADD, OTHER_PD, 0, 0, 8),
	ACCESS("freed MR, WRITE", WRITE, FREED, 0, 0, 100),
	ACCESS("freed MR, READ", READ, FREED, 0, 0, 100),
	ACCESS("freed MR, FAA", ADD, FREED, 0, 0, 8),
	ACCESS("MR for reading, WRITE", WRITE, READ_ONLY, 0, 0, 100),
	ACCESS("MR for reading, FAA", ADD, READ_ONLY, 0, 0, 8),
	ACCESS("MR for writing, READ", READ, WRITE_ONLY, 0, 0, 100),
	ACCESS("MR for writing, FAA", ADD, WRITE_ONLY, 0, 0, 8),
	ACCESS("MR without remote access, WRITE", WRITE, NO_REMOTE, 0, 0, 100),
	ACCESS("MR without remote access, READ", READ, NO_REMOTE, 0, 0, 100),
	ACCESS("MR without remote access, FAA", ADD, NO_REMOTE, 0, 0, 8),
	REQUEST("QP without REMOTE_WRITE, WRITE", WRITE, 0, QP_ALL & ~IBV_ACCESS_REMOTE_WRITE),
	REQUEST("QP without REMOTE_READ, READ", READ, 0, QP_ALL & ~IBV_ACCESS_REMOTE_READ),
	REQUEST("QP without REMOTE_ATOMIC, FAA", ADD, 0, QP_ALL & ~IBV_ACCESS_REMOTE_ATOMIC),
	REQUEST("misaligned, FAA", ADD, 4, QP_ALL),
	{"message longer than the receive", SEND, ALL, 0, 0, 200, QP_ALL, FINE, SHORT, IBV_WC_REM_INV_REQ_ERR, NO_EVENT, true, IBV_WC_LOC_LEN_ERR},
	{"receive with a wrong lkey", SEND, ALL, 0, 0, 200, QP_ALL, FINE, RECV_BAD_LKEY, IBV_WC_REM_OP_ERR, NO_EVENT, true, IBV_WC_LOC_PROT_ERR},
	{"receive without LOCAL_WRITE", SEND, ALL, 0, 0, 200, QP_ALL, FINE, RECV_NO_LOCAL_WRITE, IBV_WC_REM_OP_ERR, NO_EVENT, true, IBV_WC_LOC_PROT_ERR},
	{"no receive", SEND, ALL, 0, 0, 200, QP_ALL, FINE, ABSENT, IBV_WC_RNR_RETRY_EXC_ERR, NO_EVENT, false, IBV_WC_SUCCESS},
	LOCAL("wrong lkey, WRITE", WRITE, BAD_LKEY),
	LOCAL("wrong lkey, READ", READ, BAD_LKEY),
	LOCAL("wrong lkey, SEND", SEND, BAD_LKEY),
	LOCAL("READ into an MR without LOCAL_WRITE", READ, NO_LOCAL_WRITE),
	LOCAL("FAA into an MR without LOCAL_WRITE", ADD, NO_LOCAL_WRITE),
	LOCAL("piece beyond its MR, WRITE", WRITE, TOO_LONG),
	LOCAL("piece beyond its MR, READ", READ, TOO_LONG),
	LOCAL("piece of another PD, SEND", SEND, OWN_OTHER_PD),
	LOCAL("piece of another PD, READ", READ, OWN_OTHER_PD),
	LOCAL("piece of a freed MR, WRITE", WRITE, OWN_FREED),
};

struct remote {
	uint64_t addr;
	uint32_t rkey;
	uint32_t spare;
};

static struct node node;
static struct ibv_pd *other_pd;
static struct ibv_cq *send_cq, *recv_cq;
static struct ibv_qp *qp;
static uint8_t *memory; /* EDGE, SIZE registered, EDGE */
static struct ibv_mr *mrs[REGIONS];
static uint32_t freed_lkey;
static struct remote remote[REGIONS];

/*
 * --mode foreign: one end is kernel rxe. It raises no events at a responder, refuses to post a misaligned atomic, names a
 * receive that cannot be filled an operation error, and a fault of the requester's own memory a flushed request.
 */
static bool foreign(void)
{
	return strcmp(opt.mode, "foreign") == 0;
}

static bool possible(const struct trial *trial)
{
	bool misaligned = trial->what == ADD && trial->offset % 8 != 0;

	return !foreign() || !(misaligned || (trial->receive != GOOD && trial->receive != ABSENT) || trial->own != FINE);
}

static void set_up(void)
{
	static const int access[REGIONS] = {
		[ALL] = ALL_REMOTE,
		[READ_ONLY] = IBV_ACCESS_REMOTE_READ,
		[WRITE_ONLY] = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
		[NO_REMOTE] = IBV_ACCESS_LOCAL_WRITE,
		[FREED] = ALL_REMOTE,
		[OTHER_PD] = ALL_REMOTE,
	};
	struct remote mine[REGIONS] = {{0}};

	node = node_open();
	other_pd = ibv_alloc_pd(node.context);
	CHECK(other_pd != NULL, "ibv_alloc_pd: %s", strerror(errno));
	send_cq = cq_make(&node, 64, NULL);
	recv_cq = cq_make(&node, 64, NULL);
	qp = qp_make(&node, send_cq, recv_cq, NULL, 16);
	memory = pages(EDGE + SIZE + EDGE);
	for (int i = 0; i < REGIONS; i++) {
		mrs[i] = mr_make(i == OTHER_PD ? other_pd : node.pd, memory + EDGE, SIZE, access[i]);
		mine[i] = (struct remote){(uintptr_t)memory + EDGE, mrs[i]->rkey, 0};
	}
	freed_lkey = mrs[FREED]->lkey;
	CHECK(ibv_dereg_mr(mrs[FREED]) == 0, "ibv_dereg_mr failed");
	swap(mine, remote, sizeof(mine));
	int flags = fcntl(node.context->async_fd, F_GETFL);
	CHECK(fcntl(node.context->async_fd, F_SETFL, flags | O_NONBLOCK) == 0, "O_NONBLOCK: %s", strerror(errno));
}

static void reconnect(const struct trial *trial)
{
	struct conduct conduct = usual;
	struct ibv_wc wc;

	conduct.access = trial->qp_access;
	conduct.rnr_retry = 2;
	qp_reset(qp);
	while (ibv_poll_cq(send_cq, 1, &wc) == 1 || ibv_poll_cq(recv_cq, 1, &wc) == 1)
		;
	connect_with(&node, qp, NULL, &conduct);
}

static struct ibv_sge own_piece(const struct trial *trial)
{
	struct ibv_sge sge = {.addr = (uintptr_t)memory + EDGE, .length = trial->length, .lkey = mrs[ALL]->lkey};

	switch (trial->own) {
	case FINE:
		break;
	case BAD_LKEY:
		sge.lkey ^= 0x33;
		break;
	case NO_LOCAL_WRITE:
		sge.lkey = mrs[READ_ONLY]->lkey;
		break;
	case TOO_LONG:
		sge.addr += SIZE - 4;
		break;
	case OWN_OTHER_PD:
		sge.lkey = mrs[OTHER_PD]->lkey;
		break;
	case OWN_FREED:
		sge.lkey = freed_lkey;
		break;
	}
	/* A local piece of SIZE + 1 bytes would be a local fault: take two, over the same bytes. */
	return sge;
}

static void client(const struct trial *trial)
{
	struct ibv_sge sges[2] = {own_piece(trial)};
	struct ibv_send_wr wr = {.wr_id = 7, .sg_list = sges, .num_sge = 1, .opcode = opcodes[trial->what], .send_flags = IBV_SEND_SIGNALED}, *bad;
	uint64_t addr = remote[trial->region].addr + (uint64_t)(int64_t)trial->offset;
	uint32_t rkey = remote[trial->region].rkey ^ trial->key_change;

	if (trial->length > SIZE) {
		sges[0].length = SIZE;
		sges[1] = (struct ibv_sge){sges[0].addr, trial->length - SIZE, sges[0].lkey};
		wr.num_sge = 2;
	}
	if (trial->what == ADD) {
		wr.wr.atomic.remote_addr = addr;
		wr.wr.atomic.rkey = rkey;
		wr.wr.atomic.compare_add = 1;
	} else if (trial->what != SEND) {
		wr.wr.rdma.remote_addr = addr;
		wr.wr.rdma.rkey = rkey;
	}
	int error = ibv_post_send(qp, &wr, &bad);
	CHECK(error == 0, "%s: ibv_post_send: %s", trial->name, strerror(error));
	struct ibv_wc wc = wait_wc(send_cq, trial->name);
	CHECK(wc.wr_id == 7, "%s: completion of request %" PRIu64, trial->name, wc.wr_id);
	CHECK(wc.status == trial->status, "%s: %s instead of %s", trial->name, ibv_wc_status_str(wc.status), ibv_wc_status_str(trial->status));
	/* What is posted to a QP in error is flushed. */
	wr.wr_id = 8;
	error = ibv_post_send(qp, &wr, &bad);
	CHECK(error == 0, "%s: ibv_post_send in ERR: %s", trial->name, strerror(error));
	wc = wait_wc(send_cq, trial->name);
	CHECK(wc.status == IBV_WC_WR_FLUSH_ERR && wc.wr_id == 8, "%s: the next request: %s", trial->name, ibv_wc_status_str(wc.status));
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	CHECK(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) == 0, "ibv_query_qp failed");
	CHECK(attr.qp_state == IBV_QPS_ERR, "%s: the requester's QP is in state %d", trial->name, attr.qp_state);
}

static void post_receives(const struct trial *trial)
{
	uint32_t lkey = mrs[ALL]->lkey, length = 1024;

	if (trial->receive == ABSENT)
		return;
	if (trial->receive == RECV_BAD_LKEY)
		lkey ^= 0x33;
	if (trial->receive == RECV_NO_LOCAL_WRITE)
		lkey = mrs[READ_ONLY]->lkey;
	if (trial->receive == SHORT)
		length = 100;
	for (int i = 0; i < 2; i++)
		CHECK(post_recv_one(qp, memory + EDGE, lkey, length) == 0, "posting a receive failed");
}

static void expect_event(const struct trial *trial)
{
	struct pollfd fd = {.fd = node.context->async_fd, .events = POLLIN};
	struct ibv_async_event event;

	CHECK(poll(&fd, 1, PATIENCE_S * 1000) == 1, "%s: no asynchronous event at the responder", trial->name);
	CHECK(ibv_get_async_event(node.context, &event) == 0, "ibv_get_async_event: %s", strerror(errno));
	CHECK(event.event_type == trial->event, "%s: event %s instead of %s", trial->name, ibv_event_type_str(event.event_type), ibv_event_type_str(trial->event));
	CHECK(event.element.qp == qp, "%s: the event names another QP", trial->name);
	ibv_ack_async_event(&event);
}

static void server(const struct trial *trial)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	struct ibv_wc wc;

	if (trial->event != NO_EVENT && !foreign())
		expect_event(trial);
	for (int i = 0; trial->peer_fails && i < 2; i++) {
		enum ibv_wc_status wanted = i == 0 ? trial->recv_status : IBV_WC_WR_FLUSH_ERR;

		wc = wait_wc(recv_cq, trial->name);
		CHECK(wc.status == wanted, "%s: receive %d: %s instead of %s", trial->name, i, ibv_wc_status_str(wc.status), ibv_wc_status_str(wanted));
	}
	barrier(2);
	CHECK(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) == 0, "ibv_query_qp failed");
	enum ibv_qp_state wanted = trial->peer_fails ? IBV_QPS_ERR : IBV_QPS_RTS;
	CHECK(attr.qp_state == wanted, "%s: the responder's QP is in state %d instead of %d", trial->name, attr.qp_state, wanted);
	CHECK(trial->peer_fails || ibv_poll_cq(recv_cq, 1, &wc) == 0, "%s: a receive completed", trial->name);
}

/* Events that no trial asked for, of receives that fail: take them, so that the next trial finds only its own. */
static void drop_events(void)
{
	struct ibv_async_event event;

	while (ibv_get_async_event(node.context, &event) == 0)
		ibv_ack_async_event(&event);
}

int main(int argc, char **argv)
{
	static uint8_t expected[EDGE + SIZE + EDGE];

	parse_options(argc, argv);
	side_open();
	set_up();
	unsigned count = sizeof(trials) / sizeof(trials[0]);
	for (unsigned i = 0; i < count; i++) {
		if (!possible(&trials[i]))
			continue;
		reconnect(&trials[i]);
		pattern(memory, i * 2 + is_client(), 0, sizeof(expected));
		pattern(expected, i * 2 + is_client(), 0, sizeof(expected));
		if (!is_client())
			post_receives(&trials[i]);
		barrier(1);
		if (is_client()) {
			client(&trials[i]);
			barrier(2);
		} else {
			server(&trials[i]);
		}
		/* A message that does not fit may have left its first bytes in the receive it was for, a READ that failed some
		   bytes where all were to go. */
		if (trials[i].receive == SHORT)
			memcpy(memory + EDGE, expected + EDGE, 100);
		/* An atomic whose answer cannot be stored has been executed: the specification looks at the answer's place late. */
		if (!is_client() && trials[i].what == ADD && trials[i].own != FINE)
			memcpy(memory + EDGE, expected + EDGE, 8);
		if (is_client() && trials[i].what == READ)
			memcpy(memory + EDGE, expected + EDGE, trials[i].length < SIZE ? trials[i].length : SIZE);
		for (uint32_t at = 0; at < sizeof(expected); at++)
			CHECK(memory[at] == expected[at], "%s: byte %u of the %s's memory was changed", trials[i].name, at, is_client() ? "client" : "server");
		drop_events();
		barrier(3);
	}
	ok("%u trials", count);
	return 0;
}
