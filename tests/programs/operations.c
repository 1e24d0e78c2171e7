/*
 * Operations of verbs that verify.c does not do: requests by ibv_wr_*, XRC, memory windows, ATOMIC WRITE, FLUSH, tag matching.
 */
#include <infiniband/tm_types.h>

#include "features.h"

#define RC_OPERATIONS                                                                                                  \
	(IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE |                              \
	 IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |           \
	 IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD)

/* What later headers than those of rdma-core 44 have. */
enum {
	ACCESS_FLUSH_GLOBAL = 1 << 8,
	EX_WITH_FLUSH = 1 << 11,
	WC_FLUSH = 8,
	TO_GLOBAL = 1,
	OF_RANGE = 0,
	OF_REGION = 1,
};

/* ---- Every operation by ibv_wr_* ------------------------------------------------------------------------------------ */

enum kind { SEND, SEND_IMM, WRITE, WRITE_IMM, READ, SWAP, ADD };
enum data { NONE, ONE, SEVERAL, INLINE, INLINE_SEVERAL };

struct step {
	const char *name;
	enum kind kind;
	enum data data;
	uint32_t length;
};

/* In order, so that what a smaller type does not have is behind what it has. */
static const struct step steps[] = {
	{"SEND", SEND, ONE, 1000},
	{"SEND of nothing", SEND, NONE, 0},
	{"SEND in pieces", SEND, SEVERAL, 900},
	{"SEND inline", SEND, INLINE, 100},
	{"SEND with immediate", SEND_IMM, ONE, 700},
	{"SEND with immediate, inline in pieces", SEND_IMM, INLINE_SEVERAL, 150},
	{"SEND with immediate of nothing", SEND_IMM, NONE, 0},
	{"WRITE", WRITE, ONE, 3000},
	{"WRITE of nothing", WRITE, NONE, 0},
	{"WRITE in pieces", WRITE, SEVERAL, 2100},
	{"WRITE inline", WRITE, INLINE, 60},
	{"WRITE with immediate", WRITE_IMM, SEVERAL, 3300},
	{"WRITE with immediate of nothing", WRITE_IMM, NONE, 0},
	{"READ", READ, ONE, 3000},
	{"READ in pieces", READ, SEVERAL, 2400},
	{"READ of nothing", READ, NONE, 0},
	{"CAS", SWAP, ONE, 8},
	{"FAA", ADD, ONE, 8},
};
enum { OF_UD = 7, OF_UC = 13, OF_RC = sizeof(steps) / sizeof(steps[0]) };

/* Bytes of each step's part of the memory, of the header area in front of a datagram, and between pieces. */
#define STEP 4096u
#define GRH 40u
#define GAP 7u
#define PIECES 3u
#define OPERAND 0x1122334455667788u

static struct ibv_qp *qp;
static struct ibv_qp_ex *ex;
static struct ibv_ah *ah;
static uint32_t srqn; /* of the peer's shared receive queue, if XRC */
static bool rxe_requests;

static uint32_t at_requester(unsigned step)
{
	return step * STEP + 64;
}

static uint32_t at_responder(unsigned step)
{
	return TARGET + step * STEP + 64;
}

static bool is_send(enum kind kind)
{
	return kind == SEND || kind == SEND_IMM;
}

static bool takes_receive(enum kind kind)
{
	return is_send(kind) || kind == WRITE_IMM;
}

static bool is_inline(enum data data)
{
	return data == INLINE || data == INLINE_SEVERAL;
}

/* rxe's provider sends nothing of inline data in pieces: it counts no bytes. One piece then. */
static enum data data_of(unsigned step)
{
	return rxe_requests && steps[step].data == INLINE_SEVERAL ? INLINE : steps[step].data;
}

static uint32_t pieces_of(unsigned step)
{
	enum data data = data_of(step);

	return data == NONE ? 0 : data == SEVERAL || data == INLINE_SEVERAL ? PIECES : 1;
}

/* Where piece number i of a step's local data is. */
static uint32_t piece_at(unsigned step, uint32_t i)
{
	uint32_t pieces = pieces_of(step);

	return at_requester(step) + i * (steps[step].length / pieces + GAP);
}

/* The message of a step, from the pieces of the requester's memory. */
static void message(unsigned step, bool of_client, uint8_t *to)
{
	uint32_t pieces = pieces_of(step);

	for (uint32_t i = 0; i < pieces; i++) {
		uint32_t length = steps[step].length / pieces;

		initial(of_client, piece_at(step, i), to + i * length, length);
	}
}

/* The word that an atomic changes. */
static uint64_t word(unsigned step, bool of_client)
{
	uint64_t word;

	initial(of_client, at_responder(step), (uint8_t *)&word, 8);
	return word;
}

static void set_data(unsigned step)
{
	struct ibv_sge sges[PIECES];
	struct ibv_data_buf bufs[PIECES];
	uint32_t pieces = pieces_of(step), length = pieces ? steps[step].length / pieces : 0;

	for (uint32_t i = 0; i < pieces; i++) {
		sges[i] = (struct ibv_sge){(uintptr_t)memory + piece_at(step, i), length, mr->lkey};
		bufs[i] = (struct ibv_data_buf){memory + piece_at(step, i), length};
	}
	switch (data_of(step)) {
	case NONE:
		ibv_wr_set_sge_list(ex, 0, NULL);
		break;
	case ONE:
		ibv_wr_set_sge(ex, sges[0].lkey, sges[0].addr, sges[0].length);
		break;
	case SEVERAL:
		ibv_wr_set_sge_list(ex, pieces, sges);
		break;
	case INLINE:
		ibv_wr_set_inline_data(ex, bufs[0].addr, bufs[0].length);
		break;
	case INLINE_SEVERAL:
		ibv_wr_set_inline_data_list(ex, pieces, bufs);
		break;
	}
}

static uint32_t immediate(unsigned step)
{
	return htonl(0xfe440000 + step);
}

static void set_operation(unsigned step)
{
	uint64_t remote = peer.addr + at_responder(step), before = word(step, !is_client());

	switch (steps[step].kind) {
	case SEND:
		ibv_wr_send(ex);
		break;
	case SEND_IMM:
		ibv_wr_send_imm(ex, immediate(step));
		break;
	case WRITE:
		ibv_wr_rdma_write(ex, peer.rkey, remote);
		break;
	case WRITE_IMM:
		ibv_wr_rdma_write_imm(ex, peer.rkey, remote, immediate(step));
		break;
	case READ:
		ibv_wr_rdma_read(ex, peer.rkey, remote);
		break;
	case SWAP:
		ibv_wr_atomic_cmp_swp(ex, peer.rkey, remote, before, OPERAND);
		break;
	case ADD:
		ibv_wr_atomic_fetch_add(ex, peer.rkey, remote, OPERAND);
		break;
	}
}

/* Builds the request of a step. */
static void build(unsigned step)
{
	ex->wr_id = step;
	/* rxe's provider forgets to set the flag of what ibv_wr_set_inline_data does. */
	ex->wr_flags = IBV_SEND_SIGNALED | (is_rxe() && is_inline(steps[step].data) ? IBV_SEND_INLINE : 0);
	set_operation(step);
	if (qp->qp_type == IBV_QPT_UD)
		ibv_wr_set_ud_addr(ex, ah, peer.qpn, QKEY);
	if (qp->qp_type == IBV_QPT_XRC_SEND)
		ibv_wr_set_xrc_srqn(ex, srqn);
	set_data(step);
}

static void sent(unsigned step)
{
	static const enum ibv_wc_opcode opcodes[] = {IBV_WC_SEND, IBV_WC_SEND, IBV_WC_RDMA_WRITE, IBV_WC_RDMA_WRITE, IBV_WC_RDMA_READ,
		IBV_WC_COMP_SWAP, IBV_WC_FETCH_ADD};
	struct ibv_wc wc = done(send_cq, opcodes[steps[step].kind], steps[step].name);

	EXPECT(wc.wr_id == step && wc.qp_num == qp->qp_num, "%s: completion of request %" PRIu64 " of QP 0x%x", steps[step].name, wc.wr_id,
	       wc.qp_num);
}

/* What comes back to the requester is expected there. */
static void expect_answer(unsigned step)
{
	uint64_t before = word(step, !is_client());
	uint32_t pieces = pieces_of(step);

	if (steps[step].kind == SWAP || steps[step].kind == ADD)
		memcpy(expected + at_requester(step), &before, 8);
	for (uint32_t i = 0; steps[step].kind == READ && i < pieces; i++) {
		uint32_t length = steps[step].length / pieces;

		peers(at_responder(step) + i * length, expected + piece_at(step, i), length);
	}
}

/* All requests of a type: a batch of one each, and a batch that is given up before. */
static void request_all(unsigned count)
{
	ibv_wr_start(ex);
	build(0);
	ibv_wr_abort(ex);
	for (unsigned step = 0; step < count; step++) {
		ibv_wr_start(ex);
		build(step);
		int error = ibv_wr_complete(ex);
		EXPECT(error == 0, "%s: ibv_wr_complete: %s", steps[step].name, strerror(error));
		/* Inline data was taken: the program may reuse its memory at once. */
		if (is_inline(steps[step].data)) {
			memset(memory + at_requester(step), 0xee, 300);
			memset(expected + at_requester(step), 0xee, 300);
		}
		sent(step);
		expect_answer(step);
	}
}

static void post_receives(unsigned count, struct ibv_srq *srq, uint32_t header)
{
	for (unsigned step = 0; step < count; step++)
		if (takes_receive(steps[step].kind))
			receive_at(qp, srq, at_responder(step) - header, header + (is_send(steps[step].kind) ? 1024 : 0));
}

static void received(unsigned step, uint32_t header)
{
	enum kind kind = steps[step].kind;
	struct ibv_wc wc = done(recv_cq, kind == WRITE_IMM ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV, steps[step].name);
	bool imm = kind == SEND_IMM || kind == WRITE_IMM;

	EXPECT(wc.wr_id == at_responder(step) - header, "%s: another receive than expected", steps[step].name);
	EXPECT(wc.byte_len == steps[step].length + header, "%s: %u bytes came", steps[step].name, wc.byte_len);
	EXPECT(((wc.wc_flags & IBV_WC_WITH_IMM) != 0) == imm, "%s: flags 0x%x", steps[step].name, wc.wc_flags);
	EXPECT(!imm || wc.imm_data == immediate(step), "%s: immediate 0x%x", steps[step].name, ntohl(wc.imm_data));
	if (header) {
		EXPECT(wc.src_qp == peer.qpn && wc.wc_flags & IBV_WC_GRH, "%s: from QP 0x%x, flags 0x%x", steps[step].name, wc.src_qp, wc.wc_flags);
		/* Checked by verify.c. */
		memcpy(expected + at_responder(step) - header, memory + at_responder(step) - header, header);
	}
}

static void expect_effect(unsigned step)
{
	uint64_t after = word(step, is_client());

	switch (steps[step].kind) {
	case READ:
		break;
	case SWAP:
	case ADD:
		after = steps[step].kind == SWAP ? OPERAND : after + OPERAND;
		memcpy(expected + at_responder(step), &after, 8);
		break;
	default:
		message(step, !is_client(), expected + at_responder(step));
	}
}

static void respond_all(unsigned count, uint32_t header)
{
	for (unsigned step = 0; step < count; step++) {
		if (takes_receive(steps[step].kind))
			received(step, header);
		expect_effect(step);
	}
}

static void open_ex(enum ibv_qp_type type, uint64_t operations)
{
	qp = qp_of(type, operations, NULL);
	ex = ibv_qp_to_qp_ex(qp);
	EXPECT(ex != NULL, "ibv_qp_to_qp_ex gave NULL");
}

/* Both ends know who requests. */
static void tell_who(bool requests)
{
	uint8_t mine = is_rxe(), theirs;

	swap(&mine, &theirs, 1);
	rxe_requests = requests ? mine : theirs;
}

static void request_by_wr(enum ibv_qp_type type, uint64_t operations, unsigned count)
{
	tell_who(true);
	open_ex(type, operations);
	meet(qp);
	if (type == IBV_QPT_UD)
		ah = ah_make(node.pd, &peer);
	barrier(1);
	request_all(count);
	part(qp);
	EXPECT(type != IBV_QPT_UD || ibv_destroy_ah(ah) == 0, "ibv_destroy_ah failed");
}

static void respond_by_wr(enum ibv_qp_type type, unsigned count)
{
	uint32_t header = type == IBV_QPT_UD ? GRH : 0;

	tell_who(false);
	qp = qp_of(type, 0, NULL);
	meet(qp);
	post_receives(count, NULL, header);
	barrier(1);
	respond_all(count, header);
	part(qp);
}

enum {
	UD_OPERATIONS = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM,
	UC_OPERATIONS = UD_OPERATIONS | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM,
};

static bool has_wr_rc(bool requests)
{
	return !requests || has_qp(IBV_QPT_RC, RC_OPERATIONS);
}

static void request_wr_rc(void)
{
	request_by_wr(IBV_QPT_RC, RC_OPERATIONS, OF_RC);
}

static void respond_wr_rc(void)
{
	respond_by_wr(IBV_QPT_RC, OF_RC);
}

static bool has_wr_uc(bool requests)
{
	return !requests || has_qp(IBV_QPT_UC, UC_OPERATIONS);
}

static void request_wr_uc(void)
{
	request_by_wr(IBV_QPT_UC, UC_OPERATIONS, OF_UC);
}

/* A WRITE without immediate is told of by nothing; but the one with immediate comes after it. */
static void respond_wr_uc(void)
{
	respond_by_wr(IBV_QPT_UC, OF_UC);
}

static bool has_wr_ud(bool requests)
{
	return !requests || has_qp(IBV_QPT_UD, UD_OPERATIONS);
}

static void request_wr_ud(void)
{
	request_by_wr(IBV_QPT_UD, UD_OPERATIONS, OF_UD);
}

static void respond_wr_ud(void)
{
	respond_by_wr(IBV_QPT_UD, OF_UD);
}

/* ---- XRC ------------------------------------------------------------------------------------------------------------- */

static struct ibv_xrcd *open_domain(void)
{
	struct ibv_xrcd_init_attr attr = {.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1, .oflags = O_CREAT};

	return ibv_open_xrcd(node.context, &attr);
}

static bool has_xrc(bool requests)
{
	struct ibv_xrcd *xrcd;

	if (requests)
		return has_qp(IBV_QPT_XRC_SEND, RC_OPERATIONS);
	xrcd = open_domain();
	EXPECT(!xrcd || ibv_close_xrcd(xrcd) == 0, "ibv_close_xrcd failed");
	return xrcd != NULL;
}

static void request_xrc(void)
{
	tell_who(true);
	open_ex(IBV_QPT_XRC_SEND, RC_OPERATIONS);
	meet(qp);
	side_recv(&srqn, sizeof(srqn));
	barrier(1);
	request_all(OF_RC);
	part(qp);
}

static void respond_xrc(void)
{
	struct ibv_xrcd *xrcd = open_domain();
	struct ibv_srq_init_attr_ex attr = {
		.attr = {.max_wr = 32, .max_sge = 4},
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_PD,
		.srq_type = IBV_SRQT_XRC,
		.pd = node.pd,
		.xrcd = xrcd,
		.cq = recv_cq,
	};
	struct ibv_srq *srq = ibv_create_srq_ex(node.context, &attr);
	struct ibv_qp_init_attr_ex init = {.qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = xrcd};
	uint32_t number;

	EXPECT(srq != NULL, "ibv_create_srq_ex: %s", strerror(errno));
	tell_who(false);
	qp = ibv_create_qp_ex(node.context, &init);
	EXPECT(qp != NULL, "ibv_create_qp_ex of a target: %s", strerror(errno));
	meet(qp);
	post_receives(OF_RC, srq, 0);
	EXPECT(ibv_get_srq_num(srq, &number) == 0, "ibv_get_srq_num failed");
	side_send(&number, sizeof(number));
	barrier(1);
	respond_all(OF_RC, 0);
	part(qp);
	EXPECT(ibv_destroy_srq(srq) == 0 && ibv_close_xrcd(xrcd) == 0, "ibv_destroy_srq or ibv_close_xrcd failed");
}

/* ---- Memory windows ---------------------------------------------------------------------------------------------------- */

#define WINDOW (TARGET + 100)
#define WINDOW_LENGTH 1000u
#define MESSAGE (TARGET + 8192)
#define WINDOW_OPERATIONS (IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_SEND_WITH_INV)

/* How a window is closed. */
enum closing { BY_UNBINDING, BY_LOCAL_INVALIDATE, BY_REMOTE_INVALIDATE, BY_DEALLOCATION };

struct window {
	uint64_t addr;
	uint32_t rkey;
	uint32_t spare;
};

static bool has_window(enum ibv_mw_type type, bool by_wr)
{
	struct ibv_mw *mw = ibv_alloc_mw(node.pd, type);

	EXPECT(!mw || ibv_dealloc_mw(mw) == 0, "ibv_dealloc_mw failed");
	return mw && (!by_wr || has_qp(IBV_QPT_RC, WINDOW_OPERATIONS));
}

static void post(struct ibv_send_wr *wr, const char *what)
{
	struct ibv_send_wr *bad;

	wr->send_flags = IBV_SEND_SIGNALED;
	int error = ibv_post_send(qp, wr, &bad);
	EXPECT(error == 0, "posting %s: %s", what, strerror(error));
}

static void complete(const char *what)
{
	int error = ibv_wr_complete(ex);

	EXPECT(error == 0, "%s: ibv_wr_complete: %s", what, strerror(error));
}

static void start(void)
{
	ibv_wr_start(ex);
	ex->wr_id = 1;
	ex->wr_flags = IBV_SEND_SIGNALED;
}

/* Binds a window of length bytes, and gives its key. */
static uint32_t bind_window(struct ibv_mw *mw, bool by_wr, uint32_t length)
{
	struct ibv_mw_bind_info info = {mr, (uintptr_t)memory + WINDOW, length, length ? IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ : 0};
	uint32_t rkey = ibv_inc_rkey(mw->rkey);

	if (mw->type == IBV_MW_TYPE_1) {
		struct ibv_mw_bind bind = {.wr_id = 1, .send_flags = IBV_SEND_SIGNALED, .bind_info = info};

		int error = ibv_bind_mw(qp, mw, &bind);
		EXPECT(error == 0, "ibv_bind_mw: %s", strerror(error));
		rkey = mw->rkey;
	} else if (by_wr) {
		start();
		ibv_wr_bind_mw(ex, mw, rkey, &info);
		complete("ibv_wr_bind_mw");
	} else {
		struct ibv_send_wr wr = {.wr_id = 1, .opcode = IBV_WR_BIND_MW, .bind_mw = {mw, rkey, info}};

		post(&wr, "BIND_MW");
	}
	done(send_cq, IBV_WC_BIND_MW, "binding a window");
	return rkey;
}

static void invalidate_locally(uint32_t rkey, bool by_wr)
{
	if (by_wr) {
		start();
		ibv_wr_local_inv(ex, rkey);
		complete("ibv_wr_local_inv");
	} else {
		struct ibv_send_wr wr = {.wr_id = 1, .opcode = IBV_WR_LOCAL_INV, .invalidate_rkey = rkey};

		post(&wr, "LOCAL_INV");
	}
	done(send_cq, IBV_WC_LOCAL_INV, "LOCAL_INV");
}

static void send_and_invalidate(uint32_t rkey, bool by_wr)
{
	struct ibv_sge sge = {(uintptr_t)memory + 4096, 500, mr->lkey};

	if (by_wr) {
		start();
		ibv_wr_send_inv(ex, rkey);
		ibv_wr_set_sge(ex, sge.lkey, sge.addr, sge.length);
		complete("ibv_wr_send_inv");
	} else {
		struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_INV, .invalidate_rkey = rkey};

		post(&wr, "SEND_WITH_INV");
	}
	done(send_cq, IBV_WC_SEND, "SEND_WITH_INV");
}

static void received_invalidation(uint32_t rkey)
{
	struct ibv_wc wc = done(recv_cq, IBV_WC_RECV, "SEND_WITH_INV");

	EXPECT(wc.byte_len == 500, "the SEND_WITH_INV brought %u bytes", wc.byte_len);
	/* rxe closes the window, but its completion says so by another bit. */
	EXPECT(is_rxe() || (wc.wc_flags & IBV_WC_WITH_INV && wc.invalidated_rkey == rkey), "the receive has flags 0x%x, and key 0x%x instead of 0x%x",
	       wc.wc_flags, wc.invalidated_rkey, rkey);
	peers(4096, expected + MESSAGE, 500);
}

/* The requester of all window features: it writes and reads through the window, and after its end is refused. */
static void use_window(enum closing closing, bool by_wr)
{
	struct window window;

	if (by_wr)
		open_ex(IBV_QPT_RC, WINDOW_OPERATIONS);
	else
		qp = qp_of(IBV_QPT_RC, 0, NULL);
	meet(qp);
	side_recv(&window, sizeof(window));
	one(qp, IBV_WR_RDMA_WRITE, 0, WINDOW_LENGTH, window.addr, window.rkey, IBV_WC_SUCCESS, "WRITE through the window");
	one(qp, IBV_WR_RDMA_READ, 2048, 300, window.addr + WINDOW_LENGTH - 300, window.rkey, IBV_WC_SUCCESS, "READ through the window");
	memcpy(expected + 2048, expected + WINDOW_LENGTH - 300, 300);
	if (closing == BY_REMOTE_INVALIDATE)
		send_and_invalidate(window.rkey, by_wr);
	barrier(10);
	barrier(11);
	one(qp, IBV_WR_RDMA_WRITE, 0, 1, window.addr, window.rkey, IBV_WC_REM_ACCESS_ERR, "WRITE through the closed window");
	part(qp);
}

/* The responder of all window features. */
static void lend_window(enum ibv_mw_type type, enum closing closing, bool by_wr)
{
	struct ibv_mw *mw = ibv_alloc_mw(node.pd, type);

	EXPECT(mw != NULL, "ibv_alloc_mw: %s", strerror(errno));
	if (by_wr)
		open_ex(IBV_QPT_RC, WINDOW_OPERATIONS);
	else
		qp = qp_of(IBV_QPT_RC, 0, NULL);
	meet(qp);
	struct window window = {(uintptr_t)memory + WINDOW, bind_window(mw, by_wr, WINDOW_LENGTH), 0};
	if (closing == BY_REMOTE_INVALIDATE)
		receive_at(qp, NULL, MESSAGE, 1000);
	side_send(&window, sizeof(window));
	barrier(10);
	peers(0, expected + WINDOW, WINDOW_LENGTH);
	if (closing == BY_REMOTE_INVALIDATE)
		received_invalidation(window.rkey);
	if (closing == BY_LOCAL_INVALIDATE)
		invalidate_locally(window.rkey, by_wr);
	if (closing == BY_UNBINDING)
		bind_window(mw, by_wr, 0);
	if (closing == BY_DEALLOCATION)
		EXPECT(ibv_dealloc_mw(mw) == 0, "ibv_dealloc_mw of a bound window failed");
	barrier(11);
	part(qp);
	EXPECT(closing == BY_DEALLOCATION || ibv_dealloc_mw(mw) == 0, "ibv_dealloc_mw failed");
}

#define WINDOW_FEATURE(name, type, closing, by_wr)                                                                     \
	static bool has_##name(bool requests)                                                                          \
	{                                                                                                              \
		return requests ? !(by_wr) || has_qp(IBV_QPT_RC, WINDOW_OPERATIONS) : has_window(type, by_wr);         \
	}                                                                                                              \
	static void request_##name(void)                                                                               \
	{                                                                                                              \
		use_window(closing, by_wr);                                                                            \
	}                                                                                                              \
	static void respond_##name(void)                                                                               \
	{                                                                                                              \
		lend_window(type, closing, by_wr);                                                                     \
	}

WINDOW_FEATURE(window_1, IBV_MW_TYPE_1, BY_UNBINDING, false)
WINDOW_FEATURE(window_2_local, IBV_MW_TYPE_2, BY_LOCAL_INVALIDATE, false)
WINDOW_FEATURE(window_2_remote, IBV_MW_TYPE_2, BY_REMOTE_INVALIDATE, false)
WINDOW_FEATURE(window_2_gone, IBV_MW_TYPE_2, BY_DEALLOCATION, false)
WINDOW_FEATURE(wr_window_local, IBV_MW_TYPE_2, BY_LOCAL_INVALIDATE, true)
WINDOW_FEATURE(wr_window_remote, IBV_MW_TYPE_2, BY_REMOTE_INVALIDATE, true)

/* ---- ATOMIC WRITE and FLUSH ---------------------------------------------------------------------------------------------- */

/* What a device answers, it can ask for, too. */
static bool has_atomic_write(bool requests)
{
	(void)requests;
	return has_qp(IBV_QPT_RC, IBV_QP_EX_WITH_ATOMIC_WRITE);
}

static void request_atomic_write(void)
{
	open_ex(IBV_QPT_RC, IBV_QP_EX_WITH_ATOMIC_WRITE);
	meet(qp);
	for (uint32_t at = 0; at < 64; at += 16) {
		start();
		ibv_wr_atomic_write(ex, peer.rkey, peer.addr + TARGET + at, memory + at + 1);
		complete("ibv_wr_atomic_write");
		done(send_cq, IBV_WC_ATOMIC_WRITE, "ATOMIC WRITE");
	}
	part(qp);
}

static void respond_atomic_write(void)
{
	qp = qp_of(IBV_QPT_RC, 0, NULL);
	meet(qp);
	for (uint32_t at = 0; at < 64; at += 16)
		peers(at + 1, expected + TARGET + at, 8);
	part(qp);
}

/* rxe would respond if its ICRC of a FLUSH was that of the specification. */
static bool has_flush(bool requests)
{
	struct ibv_mr *region;

	if (is_rxe())
		return false;
	if (requests)
		return has_qp(IBV_QPT_RC, EX_WITH_FLUSH | IBV_QP_EX_WITH_RDMA_WRITE);
	region = ibv_reg_mr(node.pd, memory, SPACE, ALL_REMOTE | ACCESS_FLUSH_GLOBAL);
	EXPECT(!region || ibv_dereg_mr(region) == 0, "ibv_dereg_mr failed");
	return region != NULL;
}

/* As ibv_wr_flush of later headers: through the pointer behind those of rdma-core 44. Only of a queue pair that has it. */
static void wr_flush(uint32_t rkey, uint64_t remote, size_t length, uint8_t level)
{
	void (*flush)(struct ibv_qp_ex *, uint32_t, uint64_t, size_t, uint8_t, uint8_t);

	memcpy(&flush, (char *)ex + offsetof(struct ibv_qp_ex, wr_atomic_write) + sizeof(void *), sizeof(flush));
	flush(ex, rkey, remote, length, TO_GLOBAL, level);
}

/* A WRITE and a FLUSH of it in one batch; all of the region; a region that may not be flushed. */
static void request_flush(void)
{
	struct window region;

	open_ex(IBV_QPT_RC, EX_WITH_FLUSH | IBV_QP_EX_WITH_RDMA_WRITE);
	meet(qp);
	side_recv(&region, sizeof(region));
	start();
	ibv_wr_rdma_write(ex, region.rkey, region.addr);
	ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, 5000);
	wr_flush(region.rkey, region.addr, 5000, OF_RANGE);
	wr_flush(region.rkey, 0, 0, OF_REGION);
	complete("WRITE and FLUSH");
	done(send_cq, IBV_WC_RDMA_WRITE, "WRITE");
	done(send_cq, WC_FLUSH, "FLUSH of a range");
	done(send_cq, WC_FLUSH, "FLUSH of a region");
	start();
	wr_flush(peer.rkey, peer.addr, 100, OF_RANGE);
	complete("FLUSH without the right");
	struct ibv_wc wc = wait_wc(send_cq, "FLUSH without the right");
	EXPECT(wc.status == IBV_WC_REM_ACCESS_ERR, "FLUSH without the right: %s", ibv_wc_status_str(wc.status));
	part(qp);
}

static void respond_flush(void)
{
	struct ibv_mr *flushed = mr_make(node.pd, memory + TARGET, HALF, ALL_REMOTE | ACCESS_FLUSH_GLOBAL);
	struct window region = {(uintptr_t)memory + TARGET, flushed->rkey, 0};
	struct conduct conduct = usual;

	conduct.access |= ACCESS_FLUSH_GLOBAL;
	qp = qp_of(IBV_QPT_RC, 0, NULL);
	meet_as(qp, &conduct);
	side_send(&region, sizeof(region));
	peers(0, expected + TARGET, 5000);
	part(qp);
	EXPECT(ibv_dereg_mr(flushed) == 0, "ibv_dereg_mr failed");
}

#include "tags.h"

/* ---- Main ------------------------------------------------------------------------------------------------------------------ */

#define FEATURE(id, name, rxe) {name, has_##id, request_##id, respond_##id, rxe}

static const struct feature features[] = {
	FEATURE(wr_rc, "wr-rc", BOTH),
	FEATURE(wr_uc, "wr-uc", BOTH),
	FEATURE(wr_ud, "wr-ud", BOTH),
	FEATURE(xrc, "xrc", 0),
	FEATURE(window_1, "window-1", BOTH),
	FEATURE(window_2_local, "window-2-local-invalidate", BOTH),
	FEATURE(window_2_remote, "window-2-remote-invalidate", BOTH),
	FEATURE(window_2_gone, "window-2-deallocated", BOTH),
	FEATURE(wr_window_local, "wr-window-local-invalidate", BOTH),
	FEATURE(wr_window_remote, "wr-window-remote-invalidate", BOTH),
	FEATURE(atomic_write, "atomic-write", BOTH),
	FEATURE(flush, "flush", 0),
	FEATURE(tags, "tag-matching", REQUESTS),
	FEATURE(rendezvous, "tag-matching-rendezvous", REQUESTS),
};

int main(int argc, char **argv)
{
	parse_options(argc, argv);
	try_all(features, sizeof(features) / sizeof(features[0]));
	return 0;
}
