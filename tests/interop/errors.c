/*
 * What may not be, between two ends of which one may be another implementation: wrong keys, missing rights, receives that are
 * not there, a window that was closed. Each end is the requester in turn.
 *
 * What an end saw it prints in lines that start with "saw": the same whoever the two ends are. What the specification leaves
 * no choice about is checked here besides.
 */
#include "../programs/pair.h"

#define SIZE 65536u
#define EDGE 4096u /* between the registered pages and those around them */
#define RECEIVES 2
#define RECEIVE 1024u /* bytes of a receive */

/* Regions, all over the same pages. */
enum region { ALL, READ_ONLY, WRITE_ONLY, NO_REMOTE, OTHER_PD, REGIONS };

/* When the responder posts receives. */
enum receive { READY, NEVER, LATE };

enum what { WRITE, WRITE_IMM, READ, ADD, SWAP, SEND, SEND_IMM };
static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD,
	IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM};

struct trial {
	const char *name;
	enum what what;
	enum region region;
	uint32_t key_change; /* xor to the rkey */
	uint32_t offset, length;
	int qp_access; /* access flags of the responder's QP */
	int rnr_retry;
	enum receive receive;
	enum ibv_wc_status status; /* at the requester */
	bool responder_fails;      /* its QP goes to ERR */
};

#define QP_ALL (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)
#define ACCESS(name, what, region, key, offset, length)                                                                \
	{name, what, region, key, offset, length, QP_ALL, 7, READY, IBV_WC_REM_ACCESS_ERR, true}
#define REQUEST(name, what, qp_access)                                                                                 \
	{name, what, ALL, 0, 0, 8, qp_access, 7, READY, IBV_WC_REM_INV_REQ_ERR, true}
#define NOT_READY(name, what) {name, what, ALL, 0, 0, 200, QP_ALL, 0, NEVER, IBV_WC_RNR_RETRY_EXC_ERR, false}
#define PATIENT(name, what) {name, what, ALL, 0, 0, 200, QP_ALL, 7, LATE, IBV_WC_SUCCESS, false}

static const struct trial trials[] = {
	ACCESS("WRITE, wrong rkey", WRITE, ALL, 0x5a, 0, 100),
	ACCESS("long WRITE, wrong rkey", WRITE, ALL, 0x5a, 0, 60000),
	ACCESS("READ, wrong rkey", READ, ALL, 0x5a, 0, 100),
	ACCESS("WRITE with immediate, wrong rkey", WRITE_IMM, ALL, 0x5a, 0, 100),
	ACCESS("long WRITE with immediate, wrong rkey", WRITE_IMM, ALL, 0x5a, 0, 60000),
	ACCESS("WRITE with immediate, one byte behind the region", WRITE_IMM, ALL, 0, SIZE - 99, 100),
	ACCESS("WRITE with immediate, region for reading", WRITE_IMM, READ_ONLY, 0, 0, 100),
	ACCESS("FAA, wrong rkey", ADD, ALL, 0x5a, 0, 8),
	ACCESS("CAS, wrong rkey", SWAP, ALL, 0x5a, 0, 8),
	ACCESS("WRITE, rkey of another index", WRITE, ALL, 0x5a00, 0, 100),
	ACCESS("WRITE, one byte behind the region", WRITE, ALL, 0, SIZE - 99, 100),
	ACCESS("READ, one byte behind the region", READ, ALL, 0, SIZE - 99, 100),
	ACCESS("WRITE, region of another PD", WRITE, OTHER_PD, 0, 0, 100),
	ACCESS("READ, region of another PD", READ, OTHER_PD, 0, 0, 100),
	ACCESS("WRITE, region for reading", WRITE, READ_ONLY, 0, 0, 100),
	ACCESS("FAA, region for reading", ADD, READ_ONLY, 0, 0, 8),
	ACCESS("READ, region for writing", READ, WRITE_ONLY, 0, 0, 100),
	ACCESS("CAS, region for writing", SWAP, WRITE_ONLY, 0, 0, 8),
	ACCESS("WRITE, region without remote rights", WRITE, NO_REMOTE, 0, 0, 100),
	ACCESS("READ, region without remote rights", READ, NO_REMOTE, 0, 0, 100),
	ACCESS("FAA, region without remote rights", ADD, NO_REMOTE, 0, 0, 8),
	REQUEST("WRITE, QP without the right", WRITE, QP_ALL & ~IBV_ACCESS_REMOTE_WRITE),
	REQUEST("READ, QP without the right", READ, QP_ALL & ~IBV_ACCESS_REMOTE_READ),
	REQUEST("FAA, QP without the right", ADD, QP_ALL & ~IBV_ACCESS_REMOTE_ATOMIC),
	NOT_READY("SEND, no receive, rnr_retry 0", SEND),
	NOT_READY("SEND with immediate, no receive, rnr_retry 0", SEND_IMM),
	NOT_READY("WRITE with immediate, no receive, rnr_retry 0", WRITE_IMM),
	PATIENT("SEND, late receive, rnr_retry 7", SEND),
	PATIENT("SEND with immediate, late receive, rnr_retry 7", SEND_IMM),
	PATIENT("WRITE with immediate, late receive, rnr_retry 7", WRITE_IMM),
};

static const uint32_t immediate = 0xfe440ce1;

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
static uint8_t expected[EDGE + SIZE + EDGE];
static struct ibv_mr *mrs[REGIONS];
static struct remote remote[REGIONS];

static void set_up(void)
{
	static const int access[REGIONS] = {
		[ALL] = ALL_REMOTE | IBV_ACCESS_MW_BIND,
		[READ_ONLY] = IBV_ACCESS_REMOTE_READ,
		[WRITE_ONLY] = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE,
		[NO_REMOTE] = IBV_ACCESS_LOCAL_WRITE,
		[OTHER_PD] = ALL_REMOTE,
	};
	struct remote mine[REGIONS] = {{0}};

	node = node_open();
	other_pd = ibv_alloc_pd(node.context);
	CHECK(other_pd != NULL, "ibv_alloc_pd: %s", strerror(errno));
	send_cq = cq_make(&node, 64, NULL);
	recv_cq = cq_make(&node, 64, NULL);
	qp = qp_make(&node, send_cq, recv_cq, NULL, 16);
	memory = pages(sizeof(expected));
	for (int i = 0; i < REGIONS; i++) {
		mrs[i] = mr_make(i == OTHER_PD ? other_pd : node.pd, memory + EDGE, SIZE, access[i]);
		mine[i] = (struct remote){(uintptr_t)memory + EDGE, mrs[i]->rkey, 0};
	}
	swap(mine, remote, sizeof(mine));
}

/* A new connection, and memory as it was. Both ends count alike, so that step numbers their connections. */
static void start_over(int qp_access, int rnr_retry)
{
	static uint64_t step;
	struct conduct conduct = usual;
	struct ibv_wc wc;

	conduct.access = qp_access;
	conduct.rnr_retry = rnr_retry;
	qp_reset(qp);
	while (ibv_poll_cq(send_cq, 1, &wc) == 1 || ibv_poll_cq(recv_cq, 1, &wc) == 1)
		;
	connect_with(&node, qp, NULL, &conduct);
	step++;
	pattern(memory, step * 2 + is_client(), 0, sizeof(expected));
	memcpy(expected, memory, sizeof(expected));
}

static void compare(const char *name)
{
	for (uint32_t at = 0; at < sizeof(expected); at++)
		CHECK(memory[at] == expected[at], "%s: byte %u of the %s's memory is 0x%02x instead of 0x%02x", name, at,
		      is_client() ? "client" : "server", memory[at], expected[at]);
}

static enum ibv_qp_state state_of(void)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	CHECK(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) == 0, "ibv_query_qp failed");
	return attr.qp_state;
}

static void post_receives(void)
{
	for (int i = 0; i < RECEIVES; i++)
		CHECK(post_recv_one(qp, memory + EDGE + i * RECEIVE, mrs[ALL]->lkey, RECEIVE) == 0, "posting a receive failed");
}

static void post(const struct trial *trial, uint64_t wr_id)
{
	struct ibv_sge sge = {(uintptr_t)memory + EDGE, trial->length, mrs[ALL]->lkey};
	struct ibv_send_wr wr = {.wr_id = wr_id, .sg_list = &sge, .num_sge = 1, .opcode = opcodes[trial->what], .send_flags = IBV_SEND_SIGNALED}, *bad;
	uint64_t addr = remote[trial->region].addr + trial->offset;
	uint32_t rkey = remote[trial->region].rkey ^ trial->key_change;

	if (trial->what == SEND_IMM || trial->what == WRITE_IMM)
		wr.imm_data = htonl(immediate);
	if (trial->what == ADD || trial->what == SWAP) {
		wr.wr.atomic.remote_addr = addr;
		wr.wr.atomic.rkey = rkey;
		wr.wr.atomic.compare_add = 1;
	} else if (trial->what != SEND && trial->what != SEND_IMM) {
		wr.wr.rdma.remote_addr = addr;
		wr.wr.rdma.rkey = rkey;
	}
	int error = ibv_post_send(qp, &wr, &bad);
	CHECK(error == 0, "%s: ibv_post_send: %s", trial->name, strerror(error));
}

/* What one of an end's queues gave. */
static void saw(const char *name, const char *what, const struct ibv_wc *wc)
{
	printf("saw %s: %s %" PRIu64 ": %s\n", name, what, wc->wr_id, ibv_wc_status_str(wc->status));
}

/* With rnr_retry 7 a requester asks without end. The time is long against the responder's timer of 0.64 ms: hundreds of
   attempts; how many, the harness reads from the kernel's counters. */
static void wait_in_vain(const struct trial *trial)
{
	struct ibv_wc wc;

	sleep_ms(1000);
	CHECK(ibv_poll_cq(send_cq, 1, &wc) == 0, "%s: %s before a receive was posted", trial->name, ibv_wc_status_str(wc.status));
}

static void requester(const struct trial *trial)
{
	post(trial, 7);
	if (trial->receive == LATE) {
		wait_in_vain(trial);
		barrier(2);
	}
	struct ibv_wc wc = wait_wc(send_cq, trial->name);
	saw(trial->name, "request", &wc);
	CHECK(wc.wr_id == 7 && wc.status == trial->status, "%s: request %" PRIu64 ": %s instead of %s", trial->name, wc.wr_id,
	      ibv_wc_status_str(wc.status), ibv_wc_status_str(trial->status));
	if (trial->status != IBV_WC_SUCCESS) {
		/* What is posted to a QP in error is flushed. */
		post(trial, 8);
		wc = wait_wc(send_cq, trial->name);
		saw(trial->name, "request", &wc);
		CHECK(wc.wr_id == 8 && wc.status == IBV_WC_WR_FLUSH_ERR, "%s: the next request: %s", trial->name, ibv_wc_status_str(wc.status));
	}
	printf("saw %s: the requester's QP in state %d\n", trial->name, state_of());
	barrier(3);
	/* A READ that failed may have left some bytes where all were to go. */
	if (trial->what == READ)
		memcpy(memory + EDGE, expected + EDGE, trial->length);
}

static void check_received(const struct trial *trial)
{
	struct ibv_wc wc = wait_wc(recv_cq, trial->name);
	bool imm = trial->what != SEND;

	saw(trial->name, "receive", &wc);
	CHECK(wc.status == IBV_WC_SUCCESS, "%s: the receive: %s", trial->name, ibv_wc_status_str(wc.status));
	CHECK(((wc.wc_flags & IBV_WC_WITH_IMM) != 0) == imm, "%s: the receive has flags 0x%x", trial->name, wc.wc_flags);
	CHECK(!imm || ntohl(wc.imm_data) == immediate, "%s: immediate 0x%x instead of 0x%x", trial->name, ntohl(wc.imm_data), immediate);
	CHECK(wc.byte_len == trial->length, "%s: the receive says %u bytes", trial->name, wc.byte_len);
}

/* How receive number i ends where the request is refused. One that brings an immediate in its only packet uses up a receive, to
   which the error belongs; if there are several packets, the first is refused, which uses none. */
static enum ibv_wc_status receive_status(const struct trial *trial, int i)
{
	bool used = trial->what == WRITE_IMM && trial->length <= RECEIVE && i == 0;

	return used ? trial->status : IBV_WC_WR_FLUSH_ERR;
}

static void responder(const struct trial *trial, const uint8_t *sent)
{
	struct ibv_wc wc;

	if (trial->receive == LATE) {
		barrier(2);
		post_receives();
		check_received(trial);
		memcpy(expected + EDGE, sent, trial->length);
	}
	for (int i = 0; trial->responder_fails && i < RECEIVES; i++) {
		wc = wait_wc(recv_cq, trial->name);
		saw(trial->name, "receive", &wc);
		CHECK(wc.status == receive_status(trial, i), "%s: receive %d: %s", trial->name, i, ibv_wc_status_str(wc.status));
	}
	barrier(3);
	enum ibv_qp_state state = state_of();
	printf("saw %s: the responder's QP in state %d\n", trial->name, state);
	CHECK((state == IBV_QPS_ERR) == trial->responder_fails, "%s: the responder's QP is in state %d", trial->name, state);
	CHECK(ibv_poll_cq(recv_cq, 1, &wc) == 0, "%s: one receive too many completed", trial->name);
}

static void run(const struct trial *trial, bool requests)
{
	uint8_t sent[RECEIVE], *mine = memory + EDGE;

	start_over(trial->qp_access, trial->rnr_retry);
	if (!requests && trial->receive == READY)
		post_receives();
	/* What the requester's memory holds, by which late receives are judged. */
	swap(mine, sent, sizeof(sent));
	barrier(1);
	if (requests)
		requester(trial);
	else
		responder(trial, sent);
	compare(trial->name);
	barrier(4);
}

/* ---- A window that is closed by SEND with invalidate ------------------------------------------------------------- */

#define WINDOW_AT (EDGE + 8192u)
#define WINDOW_LENGTH 1000u
#define MESSAGE_AT (EDGE + 16384u)
#define MESSAGE_LENGTH 16384u

/* rxe closes the window, but the receive's completion does not say so: a bit of its own in the place of the flag. */
static bool tells_invalidation(void)
{
	return strncmp(ibv_get_device_name(node.context->device), "rxe", 3) != 0;
}

static void window_requester(const char *name, uint32_t length)
{
	struct remote window;
	uint8_t *mine = memory + EDGE;

	side_recv(&window, sizeof(window));
	enum ibv_wc_status status = do_one(qp, IBV_WR_RDMA_WRITE, mine, mrs[ALL]->lkey, WINDOW_LENGTH, window.addr, window.rkey);
	printf("saw %s: WRITE through the window: %s\n", name, ibv_wc_status_str(status));
	CHECK(status == IBV_WC_SUCCESS, "%s: WRITE through the window: %s", name, ibv_wc_status_str(status));
	struct ibv_sge sge = {(uintptr_t)mine, length, mrs[ALL]->lkey};
	struct ibv_send_wr wr = {.wr_id = 7, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_INV, .send_flags = IBV_SEND_SIGNALED}, *bad;
	wr.invalidate_rkey = window.rkey;
	int error = ibv_post_send(qp, &wr, &bad);
	CHECK(error == 0, "posting SEND_WITH_INV: %s", strerror(error));
	struct ibv_wc wc = wait_wc(send_cq, "SEND_WITH_INV");
	saw(name, "request", &wc);
	CHECK(wc.status == IBV_WC_SUCCESS, "%s: %s", name, ibv_wc_status_str(wc.status));
	barrier(2);
	status = do_one(qp, IBV_WR_RDMA_WRITE, mine, mrs[ALL]->lkey, 1, window.addr, window.rkey);
	printf("saw %s: WRITE through the closed window: %s\n", name, ibv_wc_status_str(status));
	CHECK(status == IBV_WC_REM_ACCESS_ERR, "%s: WRITE through the closed window: %s", name, ibv_wc_status_str(status));
	barrier(3);
}

static void window_responder(const char *name, uint32_t length, const uint8_t *sent)
{
	struct ibv_mw *mw = ibv_alloc_mw(node.pd, IBV_MW_TYPE_2);
	struct ibv_send_wr wr = {.opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED}, *bad;

	CHECK(mw != NULL, "ibv_alloc_mw: %s", strerror(errno));
	wr.bind_mw.mw = mw;
	wr.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
	wr.bind_mw.bind_info = (struct ibv_mw_bind_info){mrs[ALL], (uintptr_t)memory + WINDOW_AT, WINDOW_LENGTH, IBV_ACCESS_REMOTE_WRITE};
	int error = ibv_post_send(qp, &wr, &bad);
	CHECK(error == 0, "posting BIND_MW: %s", strerror(error));
	wait_success(send_cq, "BIND_MW");
	struct remote window = {(uintptr_t)memory + WINDOW_AT, wr.bind_mw.rkey, 0};
	side_send(&window, sizeof(window));
	struct ibv_wc wc = wait_wc(recv_cq, "SEND_WITH_INV");
	saw(name, "receive", &wc);
	CHECK(wc.status == IBV_WC_SUCCESS, "%s: the receive: %s", name, ibv_wc_status_str(wc.status));
	CHECK(wc.byte_len == length, "%s: the receive says %u bytes instead of %u", name, wc.byte_len, length);
	if (tells_invalidation()) {
		CHECK(wc.wc_flags & IBV_WC_WITH_INV, "%s: the receive has flags 0x%x", name, wc.wc_flags);
		CHECK(wc.invalidated_rkey == window.rkey, "%s: rkey 0x%x was closed instead of 0x%x", name, wc.invalidated_rkey, window.rkey);
	}
	memcpy(expected + WINDOW_AT, sent, WINDOW_LENGTH);
	memcpy(expected + MESSAGE_AT, sent, length);
	barrier(2);
	barrier(3);
	error = ibv_dealloc_mw(mw);
	CHECK(error == 0, "ibv_dealloc_mw: %s", strerror(error));
}

static void run_window(const char *name, uint32_t length, bool requests)
{
	static uint8_t sent[MESSAGE_LENGTH];

	start_over(QP_ALL, 7);
	if (!requests)
		CHECK(post_recv_one(qp, memory + MESSAGE_AT, mrs[ALL]->lkey, MESSAGE_LENGTH) == 0, "posting a receive failed");
	swap(memory + EDGE, sent, sizeof(sent));
	barrier(1);
	if (requests)
		window_requester(name, length);
	else
		window_responder(name, length, sent);
	compare(name);
	barrier(4);
}

static void tear_down(void)
{
	CHECK(ibv_destroy_qp(qp) == 0, "ibv_destroy_qp failed");
	CHECK(ibv_destroy_cq(send_cq) == 0 && ibv_destroy_cq(recv_cq) == 0, "ibv_destroy_cq failed");
	for (int i = 0; i < REGIONS; i++)
		CHECK(ibv_dereg_mr(mrs[i]) == 0, "ibv_dereg_mr failed");
	CHECK(ibv_dealloc_pd(other_pd) == 0 && ibv_dealloc_pd(node.pd) == 0, "ibv_dealloc_pd failed");
	CHECK(ibv_close_device(node.context) == 0, "ibv_close_device failed");
}

int main(int argc, char **argv)
{
	parse_options(argc, argv);
	side_open();
	set_up();
	unsigned count = sizeof(trials) / sizeof(trials[0]);
	for (int end = 0; end < 2; end++) {
		bool requests = end == is_client();

		printf("saw the %s request\n", end ? "client" : "server");
		for (unsigned i = 0; i < count; i++)
			run(&trials[i], requests);
		/* In one packet; in several, of which the last has the key. */
		run_window("SEND with invalidate", 10, requests);
		run_window("long SEND with invalidate", MESSAGE_LENGTH - 3, requests);
	}
	tear_down();
	ok("%u trials", 2 * (count + 2));
	return 0;
}
