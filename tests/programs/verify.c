/*
 * Every opcode, many sizes, and every byte: what the stock bandwidth tests do not check.
 *
 * Both ends know the seed, hence all patterns and all requests of both. Work is done in batches: memory is filled,
 * requests of one end or both are posted and completed, and then each end compares all of its memory in use, guard
 * bytes included, with a model to which it applied the same requests.
 */
#include "pair.h"

#define GUARD 4096u
#define MAX_SIZE (8u << 20)
#define MAX_OPS 16
#define MAX_PIECES 4
#define GRH 40u
#define SPACE (2 * GUARD + MAX_SIZE + (64u << 10))

enum kind { SEND, SEND_IMM, WRITE, WRITE_IMM, READ, SWAP, ADD, KINDS };
static const char *const kind_names[] = {"SEND", "SEND_IMM", "WRITE", "WRITE_IMM", "READ", "CAS", "FAA"};
static const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
	IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD};
static const enum ibv_wc_opcode wc_opcodes[] = {IBV_WC_SEND, IBV_WC_SEND, IBV_WC_RDMA_WRITE, IBV_WC_RDMA_WRITE, IBV_WC_RDMA_READ,
	IBV_WC_COMP_SWAP, IBV_WC_FETCH_ADD};

struct piece {
	uint32_t offset;
	uint32_t length;
};

/* One request: where its bytes are at the requester (in memory "local") and at the responder (in memory "target"). */
struct op {
	enum kind kind;
	uint32_t size;
	uint32_t imm;
	int local_count, target_count;
	struct piece local[MAX_PIECES];
	struct piece target[MAX_PIECES]; /* one piece unless the responder scatters a SEND */
	bool inlined;
	bool swaps; /* SWAP whose comparison holds */
	bool late;  /* the responder posts its receive late */
};

struct batch {
	uint64_t key;
	struct op ops[2][MAX_OPS]; /* of the server, of the client */
	int count[2];
	uint32_t used; /* bytes of both memories that are in use, guards included */
};

static struct node node;
static struct ibv_comp_channel *channel;
static struct ibv_cq *send_cq, *recv_cq;
static struct ibv_srq *srq;
static struct ibv_qp *qp;
static struct ibv_ah *ah;
static uint8_t *local, *target, *model;
static struct ibv_mr *local_mr, *target_mr;
static struct address peer;
static uint32_t max_inline, mtu;
static unsigned long lost, batches;

static bool has_recv(enum kind kind)
{
	return kind == SEND || kind == SEND_IMM || kind == WRITE_IMM;
}

static bool has_imm(enum kind kind)
{
	return kind == SEND_IMM || kind == WRITE_IMM;
}

static bool is_send(enum kind kind)
{
	return kind == SEND || kind == SEND_IMM;
}

static bool is_atomic(enum kind kind)
{
	return kind == SWAP || kind == ADD;
}

static uint64_t key_of(const struct batch *batch, int end, bool of_target)
{
	return mix(batch->key * 4 + (uint64_t)end * 2 + of_target);
}

/* ---- The model --------------------------------------------------------------------------------------------------- */

/* The initial bytes of op at its requester, or at its responder. */
static void initial(const struct batch *batch, int end, bool of_target, uint32_t offset, uint8_t *to, uint32_t length)
{
	pattern(to, key_of(batch, end, of_target), offset, length);
}

static uint64_t initial_word(const struct batch *batch, int end, bool of_target, uint32_t offset)
{
	uint64_t word;

	initial(batch, end, of_target, offset, (uint8_t *)&word, 8);
	return word;
}

/* Moves the bytes of op in the model of "local" of its requester (READ, atomics) or of "target" of its responder. */
static void apply(const struct batch *batch, int requester, const struct op *op, bool of_target)
{
	static uint8_t bytes[MAX_SIZE];
	const struct piece *pieces = of_target ? op->target : op->local;
	int count = of_target ? op->target_count : op->local_count;
	uint32_t at = 0;

	if (is_atomic(op->kind)) {
		uint64_t before = initial_word(batch, !requester, true, op->target[0].offset), after = before;

		if (op->kind == ADD)
			after = before + op->imm;
		else if (op->swaps)
			after = mix(op->imm);
		memcpy(model + pieces[0].offset, of_target ? &after : &before, 8);
		return;
	}
	if ((op->kind == READ) == of_target)
		return; /* a source: unchanged */
	if (op->kind == READ) {
		initial(batch, !requester, true, op->target[0].offset, bytes, op->size);
	} else {
		for (int i = 0; i < op->local_count; i++) {
			initial(batch, requester, false, op->local[i].offset, bytes + at, op->local[i].length);
			at += op->local[i].length;
		}
	}
	at = 0;
	for (int i = 0; i < count && at < op->size; i++) {
		uint32_t take = pieces[i].length < op->size - at ? pieces[i].length : op->size - at;

		memcpy(model + pieces[i].offset, bytes + at, take);
		at += take;
	}
}

static void compare(const struct batch *batch, int end, bool of_target)
{
	const uint8_t *memory = of_target ? target : local;
	const char *name = of_target ? "target" : "local";

	pattern(model, key_of(batch, end, of_target), 0, batch->used);
	for (int i = 0; i < batch->count[of_target ? !end : end]; i++)
		apply(batch, of_target ? !end : end, &batch->ops[of_target ? !end : end][i], of_target);
	if (memcmp(memory, model, batch->used) == 0)
		return;
	uint32_t first = 0, wrong = 0;
	for (uint32_t i = batch->used; i-- > 0;)
		if (memory[i] != model[i]) {
			first = i;
			wrong++;
		}
	for (int who = 0; who < 2; who++)
		for (int i = 0; i < batch->count[who]; i++) {
			const struct op *op = &batch->ops[who][i];

			fprintf(stderr, "  %s: %s of %u bytes%s%s, local at %u in %d pieces, target at %u in %d pieces\n",
				who ? "client" : "server", kind_names[op->kind], op->size, op->inlined ? " inline" : "",
				op->late ? " late" : "", op->local[0].offset, op->local_count, op->target[0].offset, op->target_count);
		}
	die("batch %lu: %u bytes of %s memory are wrong, first at %u of %u: 0x%02x instead of 0x%02x", batches, wrong, name, first,
	    batch->used, memory[first], model[first]);
}

/* ---- Completions --------------------------------------------------------------------------------------------------- */

/* The next completion; false if none came within seconds. */
static bool next_wc(struct ibv_cq *cq, struct ibv_wc *wc, double seconds)
{
	double end = now_s() + seconds;

	for (;;) {
		int n = ibv_poll_cq(cq, 1, wc);

		CHECK(n >= 0, "ibv_poll_cq: %d", n);
		if (n == 1)
			return true;
		if (now_s() > end)
			return false;
		if (!channel)
			continue;
		/* Receives are announced when solicited, which all requests of this program are. */
		CHECK(ibv_req_notify_cq(cq, cq == recv_cq) == 0, "ibv_req_notify_cq: %s", strerror(errno));
		n = ibv_poll_cq(cq, 1, wc);
		CHECK(n >= 0, "ibv_poll_cq: %d", n);
		if (n == 1)
			return true;
		struct pollfd fd = {.fd = channel->fd, .events = POLLIN};
		if (poll(&fd, 1, (int)(seconds * 1000)) == 0) {
			CHECK(ibv_poll_cq(cq, 1, wc) != 1, "a completion came without an event");
			return false;
		}
		struct ibv_cq *which;
		void *cookie;
		CHECK(ibv_get_cq_event(channel, &which, &cookie) == 0, "ibv_get_cq_event: %s", strerror(errno));
		CHECK(which == send_cq || which == recv_cq, "an event of an unknown CQ");
		ibv_ack_cq_events(which, 1);
	}
}

static void check_recv(const struct batch *batch, int end, int index, const struct ibv_wc *wc)
{
	const struct op *op = &batch->ops[!end][index];
	uint32_t extra = opt.type == IBV_QPT_UD ? GRH : 0;
	bool imm = has_imm(op->kind);

	CHECK(wc->status == IBV_WC_SUCCESS, "receive of %s of %u bytes: %s", kind_names[op->kind], op->size, ibv_wc_status_str(wc->status));
	enum ibv_wc_opcode wanted = op->kind == WRITE_IMM ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV;
	CHECK(wc->opcode == wanted, "receive of %s has opcode %u", kind_names[op->kind], wc->opcode);
	CHECK(wc->byte_len == op->size + extra, "receive of %s of %u bytes says %u", kind_names[op->kind], op->size, wc->byte_len);
	CHECK(((wc->wc_flags & IBV_WC_WITH_IMM) != 0) == imm, "receive of %s has flags 0x%x", kind_names[op->kind], wc->wc_flags);
	CHECK(!imm || wc->imm_data == htonl(op->imm), "immediate 0x%x instead of 0x%x", ntohl(wc->imm_data), op->imm);
	CHECK(wc->qp_num == qp->qp_num, "receive names QP 0x%x", wc->qp_num);
	CHECK(wc->wr_id == 1000u + (uint64_t)index, "receive has wr_id %" PRIu64 " instead of %d", wc->wr_id, 1000 + index);
	if (opt.type != IBV_QPT_UD)
		return;
	CHECK(wc->src_qp == peer.qpn, "source QP 0x%x instead of 0x%x", wc->src_qp, peer.qpn);
	CHECK(wc->wc_flags & IBV_WC_GRH, "no GRH flag");
	const uint8_t *grh = target + op->target[0].offset - GRH;
	if (peer.gid.raw[10] == 0xff && peer.gid.raw[11] == 0xff) {
		CHECK(grh[20] == 0x45, "no IPv4 header at +20 of the GRH area: 0x%02x", grh[20]);
		CHECK(memcmp(grh + 32, peer.gid.raw + 12, 4) == 0, "a wrong source address in the GRH area");
		CHECK(memcmp(grh + 36, node.gid.raw + 12, 4) == 0, "a wrong destination address in the GRH area");
	} else {
		CHECK(grh[0] >> 4 == 6, "no IPv6 header in the GRH area");
		CHECK(memcmp(grh + 8, peer.gid.raw, 16) == 0, "a wrong source GID in the GRH area");
		CHECK(memcmp(grh + 24, node.gid.raw, 16) == 0, "a wrong destination GID in the GRH area");
	}
}

/* ---- One batch ----------------------------------------------------------------------------------------------------- */

static void post_recv(const struct op *op, int index)
{
	struct ibv_sge sges[MAX_PIECES + 1];
	struct ibv_recv_wr wr = {.wr_id = 1000u + (uint64_t)index, .sg_list = sges}, *bad;

	if (is_send(op->kind)) {
		for (int i = 0; i < op->target_count; i++)
			sges[i] = (struct ibv_sge){(uintptr_t)target + op->target[i].offset, op->target[i].length, target_mr->lkey};
		wr.num_sge = op->target_count;
		if (opt.type == IBV_QPT_UD) {
			sges[0].addr -= GRH;
			sges[0].length += GRH;
		}
	}
	int error = srq ? ibv_post_srq_recv(srq, &wr, &bad) : ibv_post_recv(qp, &wr, &bad);
	CHECK(error == 0, "posting a receive: %s", strerror(error));
}

static void post_op(const struct batch *batch, int end, int index, bool signaled)
{
	const struct op *op = &batch->ops[end][index];
	struct ibv_sge sges[MAX_PIECES];
	struct ibv_send_wr wr = {.wr_id = (uint64_t)index, .sg_list = sges, .num_sge = op->local_count, .opcode = opcodes[op->kind]}, *bad;

	for (int i = 0; i < op->local_count; i++)
		sges[i] = (struct ibv_sge){(uintptr_t)local + op->local[i].offset, op->local[i].length, op->inlined ? 0 : local_mr->lkey};
	wr.send_flags = (signaled ? IBV_SEND_SIGNALED : 0u) | (op->inlined ? IBV_SEND_INLINE : 0u) | (has_recv(op->kind) ? IBV_SEND_SOLICITED : 0u);
	if (has_imm(op->kind))
		wr.imm_data = htonl(op->imm);
	if (opt.type == IBV_QPT_UD) {
		wr.wr.ud.ah = ah;
		wr.wr.ud.remote_qpn = peer.qpn;
		wr.wr.ud.remote_qkey = QKEY;
	} else if (is_atomic(op->kind)) {
		uint64_t before = initial_word(batch, !end, true, op->target[0].offset);

		wr.wr.atomic.remote_addr = peer.addr + op->target[0].offset;
		wr.wr.atomic.rkey = peer.rkey;
		wr.wr.atomic.compare_add = op->kind == ADD ? op->imm : op->swaps ? before : ~before;
		wr.wr.atomic.swap = mix(op->imm);
	} else if (!is_send(op->kind)) {
		wr.wr.rdma.remote_addr = peer.addr + op->target[0].offset;
		wr.wr.rdma.rkey = peer.rkey;
	}
	int error = ibv_post_send(qp, &wr, &bad);
	CHECK(error == 0, "posting %s of %u bytes: %s", kind_names[op->kind], op->size, strerror(error));
	/* Inline data was taken: the program may reuse its memory at once. */
	if (op->inlined)
		for (int i = 0; i < op->local_count; i++)
			memset(local + op->local[i].offset, 0xee, op->local[i].length);
}

/* Restores what post_op overwrote, so that the comparison finds the pattern. */
static void restore_inline(const struct batch *batch, int end)
{
	for (int i = 0; i < batch->count[end]; i++) {
		const struct op *op = &batch->ops[end][i];

		for (int j = 0; op->inlined && j < op->local_count; j++)
			initial(batch, end, false, op->local[j].offset, local + op->local[j].offset, op->local[j].length);
	}
}

static void complete_sends(const struct batch *batch, int end)
{
	int count = batch->count[end];
	struct ibv_wc wc;

	/* With many requests only every third is signaled, and the last. */
	for (int i = 0; i < count; i++) {
		const struct op *op = &batch->ops[end][i];

		if (count > 1 && i % 3 != 0 && i != count - 1)
			continue;
		CHECK(next_wc(send_cq, &wc, PATIENCE_S), "batch %lu: no completion of %s of %u bytes within %d s", batches,
		      kind_names[op->kind], op->size, PATIENCE_S);
		CHECK(wc.status == IBV_WC_SUCCESS, "batch %lu: %s of %u bytes: %s", batches, kind_names[op->kind], op->size, ibv_wc_status_str(wc.status));
		CHECK(wc.wr_id == (uint64_t)i, "completion of request %" PRIu64 " instead of %d", wc.wr_id, i);
		CHECK(wc.opcode == wc_opcodes[op->kind], "completion of %s has opcode %u", kind_names[op->kind], wc.opcode);
		CHECK(wc.qp_num == qp->qp_num, "completion names QP 0x%x", wc.qp_num);
	}
}

/* Waits for the messages of the other end. False if one of them was lost, which only unreliable transports may do. */
static bool complete_recvs(const struct batch *batch, int end)
{
	bool reliable = opt.type == IBV_QPT_RC;
	struct ibv_wc wc;

	for (int i = 0; i < batch->count[!end]; i++) {
		if (!has_recv(batch->ops[!end][i].kind))
			continue;
		if (!next_wc(recv_cq, &wc, reliable ? PATIENCE_S : 3)) {
			CHECK(!reliable, "batch %lu: no message within %d s", batches, PATIENCE_S);
			return false;
		}
		check_recv(batch, end, i, &wc);
	}
	return true;
}

/* The GRH area in front of a datagram was checked by itself: for the comparison it is as if nothing had come there. */
static void restore_grh(const struct batch *batch, int end)
{
	for (int i = 0; opt.type == IBV_QPT_UD && i < batch->count[!end]; i++) {
		uint32_t offset = batch->ops[!end][i].target[0].offset - GRH;

		initial(batch, end, true, offset, target + offset, GRH);
	}
}

/* Bytes of WRITEs over UC have no completion at the responder: give them time to come. */
static void await_writes(const struct batch *batch, int end)
{
	double until = now_s() + 3;

	for (int i = 0; opt.type == IBV_QPT_UC && i < batch->count[!end]; i++) {
		const struct op *op = &batch->ops[!end][i];
		uint8_t wanted[8];
		uint32_t length = op->size < 8 ? op->size : 8, at = op->target[0].offset + op->size - length;

		if (op->kind != WRITE || length == 0)
			continue;
		const struct piece *last = &op->local[op->local_count - 1];
		if (last->length < length)
			length = last->length, at = op->target[0].offset + op->size - length;
		initial(batch, !end, false, last->offset + last->length - length, wanted, length);
		while (memcmp((void *)(target + at), wanted, length) != 0 && now_s() < until)
			sleep_ms(1);
	}
}

static bool try_batch(const struct batch *batch, int end)
{
	pattern(local, key_of(batch, end, false), 0, batch->used);
	pattern(target, key_of(batch, end, true), 0, batch->used);
	bool late = false;
	for (int i = 0; i < batch->count[!end]; i++) {
		late |= batch->ops[!end][i].late;
		if (has_recv(batch->ops[!end][i].kind) && !batch->ops[!end][i].late)
			post_recv(&batch->ops[!end][i], i);
	}
	barrier((uint32_t)batches);
	for (int i = 0; i < batch->count[end]; i++)
		post_op(batch, end, i, batch->count[end] == 1 || i % 3 == 0 || i == batch->count[end] - 1);
	if (late) {
		sleep_ms(20);
		for (int i = 0; i < batch->count[!end]; i++)
			if (batch->ops[!end][i].late)
				post_recv(&batch->ops[!end][i], i);
	}
	complete_sends(batch, end);
	bool all_came = complete_recvs(batch, end);
	await_writes(batch, end);
	restore_inline(batch, end);
	uint8_t mine = all_came, theirs;
	swap(&mine, &theirs, 1);
	return mine && theirs;
}

/* A new queue pair in the old one's place: after a loss receives are left over. */
static void reconnect(void)
{
	struct ibv_wc wc;

	qp_reset(qp);
	while (ibv_poll_cq(send_cq, 1, &wc) == 1 || ibv_poll_cq(recv_cq, 1, &wc) == 1)
		;
	peer = connect_with(&node, qp, target_mr, &usual);
}

static void run_batch(const struct batch *batch)
{
	int end = is_client();

	batches++;
	for (int attempt = 1; !try_batch(batch, end); attempt++) {
		lost++;
		CHECK(attempt < 4, "batch %lu: a message was lost %d times running", batches, attempt);
		reconnect();
	}
	restore_grh(batch, end);
	compare(batch, end, false);
	compare(batch, end, true);
	barrier((uint32_t)batches + 1000000);
}

/* ---- Which requests --------------------------------------------------------------------------------------------- */

static uint64_t random_state;

static uint32_t below(uint32_t n)
{
	random_state = mix(random_state);
	return (uint32_t)(random_state >> 16) % n;
}

/* Cuts size bytes into pieces with odd lengths and gaps, the first at *at; moves *at behind them. */
static int cut(struct piece *pieces, int wanted, uint32_t size, uint32_t *at)
{
	uint32_t left = size;
	int count = 0;

	while (count < wanted - 1 && left > 2) {
		uint32_t length = (below(left - 1) + 1) | 1u;

		if (length >= left)
			break;
		pieces[count++] = (struct piece){*at, length};
		*at += length + 7 + below(9);
		left -= length;
	}
	pieces[count++] = (struct piece){*at, left};
	*at += left;
	return count;
}

/* Places op behind the bytes that are in use already, the requester's pieces in local, the responder's in target. */
static void place(struct op *op, int pieces, uint32_t *local_at, uint32_t *target_at)
{
	bool ud = opt.type == IBV_QPT_UD;

	*local_at += 1 + below(15);
	*target_at += 1 + below(15) + (ud ? GRH : 0);
	if (is_atomic(op->kind)) {
		*target_at = (*target_at + 7) & ~7u;
		*local_at = (*local_at + 7) & ~7u;
		op->size = 8;
		pieces = 1;
	}
	op->local_count = cut(op->local, pieces, op->size, local_at);
	/* One piece of the receiver is taken by the GRH. */
	op->target_count = cut(op->target, is_send(op->kind) && !ud ? pieces : 1, op->size, target_at);
	/* A receive may be longer than its message. */
	if (is_send(op->kind) && below(2)) {
		uint32_t longer = 1 + below(100);

		op->target[op->target_count - 1].length += longer;
		*target_at += longer;
	}
	*local_at += 64;
	*target_at += 64;
}

static bool allowed(enum kind kind)
{
	switch (opt.type) {
	case IBV_QPT_UD:
		return is_send(kind);
	case IBV_QPT_UC:
		return kind < READ;
	default:
		return true;
	}
}

static void finish(struct batch *batch, uint32_t at)
{
	batch->used = at + GUARD;
	CHECK(batch->used <= SPACE, "a batch of %u bytes", batch->used);
	batch->key = mix(random_state);
	run_batch(batch);
}

/* One request of one end. */
static void single(int end, enum kind kind, uint32_t size, int pieces, bool inlined, bool late)
{
	static struct batch batch;
	uint32_t local_at = GUARD, target_at = GUARD;
	struct op *op = &batch.ops[end][0];

	memset(&batch, 0, sizeof(batch));
	*op = (struct op){.kind = kind, .size = size, .imm = below(UINT32_MAX), .inlined = inlined, .late = late, .swaps = pieces > 1};
	place(op, pieces, &local_at, &target_at);
	batch.count[end] = 1;
	finish(&batch, local_at > target_at ? local_at : target_at);
}

static uint32_t no_more_than_asked(uint32_t size)
{
	return opt.largest && opt.largest < size ? (uint32_t)opt.largest : size;
}

static void each_opcode_and_size(void)
{
	uint32_t sizes[] = {0, 1, 63, mtu - 1, mtu, mtu + 1, 3 * mtu, (64 << 10) + 5, (1 << 20) + 3, MAX_SIZE};
	uint32_t largest = no_more_than_asked(opt.type == IBV_QPT_RC ? MAX_SIZE : opt.type == IBV_QPT_UC ? (1 << 20) + 3 : mtu);

	for (int kind = 0; kind < KINDS; kind++) {
		if (!allowed(kind))
			continue;
		for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]) && sizes[i] <= largest; i++)
			for (int end = 0; end < 2; end++)
				for (int pieces = 1; pieces <= MAX_PIECES; pieces += MAX_PIECES - 1)
					single(end, kind, sizes[i], pieces, false, false);
		uint32_t small[] = {0, 1, 17, max_inline};
		for (size_t i = 0; i < 4 && !is_atomic(kind) && kind != READ; i++)
			for (int end = 0; end < 2; end++)
				for (int pieces = 1; pieces <= MAX_PIECES; pieces += MAX_PIECES - 1)
					single(end, kind, small[i], pieces, true, false);
		if (has_recv(kind) && opt.type == IBV_QPT_RC)
			for (int end = 0; end < 2; end++)
				single(end, kind, 5 * mtu + 1, 3, false, true);
	}
}

/* Both ends at once, many requests in flight, all kinds mixed. */
static void mixtures(unsigned count)
{
	static struct batch batch;
	uint32_t largest = no_more_than_asked(opt.type == IBV_QPT_RC ? 200000 : opt.type == IBV_QPT_UC ? 3 * mtu : mtu);

	for (unsigned n = 0; n < count; n++) {
		uint32_t at = GUARD;

		memset(&batch, 0, sizeof(batch));
		for (int end = 0; end < 2; end++) {
			uint32_t local_at = GUARD, target_at = GUARD;

			batch.count[end] = 1 + (int)below(opt.type == IBV_QPT_RC ? MAX_OPS : 4);
			for (int i = 0; i < batch.count[end]; i++) {
				struct op *op = &batch.ops[end][i];

				do
					op->kind = below(KINDS);
				while (!allowed(op->kind));
				op->size = below(1u << below(19)) % (largest + 1);
				op->imm = below(UINT32_MAX);
				op->swaps = below(2);
				op->inlined = !is_atomic(op->kind) && op->kind != READ && op->size <= max_inline && below(2);
				place(op, 1 + (int)below(MAX_PIECES), &local_at, &target_at);
			}
			at = local_at > at ? local_at : at;
			at = target_at > at ? target_at : at;
		}
		finish(&batch, at);
	}
}

/* ---- SEND with invalidate ------------------------------------------------------------------------------------------ */

/* A memory window opened by the server, used, and closed by the client's SEND. Last: it ends with an error. */
static void invalidate(void)
{
	struct {
		uint32_t rkey;
		uint32_t possible;
	} window = {0};
	struct ibv_mw *mw = NULL;
	struct ibv_wc wc;

	if (!is_client()) {
		mw = ibv_alloc_mw(node.pd, IBV_MW_TYPE_2);
		if (mw) {
			struct ibv_send_wr wr = {.opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED}, *bad;

			wr.bind_mw.mw = mw;
			wr.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
			wr.bind_mw.bind_info = (struct ibv_mw_bind_info){target_mr, (uintptr_t)target + 100, 1000, IBV_ACCESS_REMOTE_WRITE};
			int error = ibv_post_send(qp, &wr, &bad);
			CHECK(error == 0, "posting BIND_MW: %s", strerror(error));
			wait_success(send_cq, "BIND_MW");
			window.rkey = wr.bind_mw.rkey;
			window.possible = 1;
			memset(target, 0, 2000);
			struct op op = {.kind = SEND, .target_count = 1, .target = {{4096, 64}}};
			post_recv(&op, 0);
		} else {
			CHECK(errno == EOPNOTSUPP, "ibv_alloc_mw: %s", strerror(errno));
		}
		side_send(&window, sizeof(window));
	} else {
		side_recv(&window, sizeof(window));
	}
	if (!window.possible) {
		printf("no memory windows: SEND with invalidate not tried\n");
		return;
	}
	if (is_client()) {
		struct ibv_sge sge = {(uintptr_t)local, 10, local_mr->lkey};
		struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_INV, .send_flags = IBV_SEND_SIGNALED}, *bad;

		memset(local, 0x5a, 1000);
		enum ibv_wc_status status = do_one(qp, IBV_WR_RDMA_WRITE, local, local_mr->lkey, 1000, peer.addr + 100, window.rkey);
		CHECK(status == IBV_WC_SUCCESS, "WRITE through the window: %s", ibv_wc_status_str(status));
		wr.invalidate_rkey = window.rkey;
		int error = ibv_post_send(qp, &wr, &bad);
		CHECK(error == 0, "posting SEND_WITH_INV: %s", strerror(error));
		wait_success(send_cq, "SEND_WITH_INV");
		barrier(77);
		status = do_one(qp, IBV_WR_RDMA_WRITE, local, local_mr->lkey, 1, peer.addr + 100, window.rkey);
		CHECK(status == IBV_WC_REM_ACCESS_ERR, "WRITE through the closed window: %s", ibv_wc_status_str(status));
		barrier(78);
	} else {
		CHECK(next_wc(recv_cq, &wc, PATIENCE_S), "no SEND with invalidate came");
		CHECK(wc.status == IBV_WC_SUCCESS, "receive of SEND_WITH_INV: %s", ibv_wc_status_str(wc.status));
		CHECK(wc.wc_flags & IBV_WC_WITH_INV, "receive of SEND_WITH_INV has flags 0x%x", wc.wc_flags);
		CHECK(wc.invalidated_rkey == window.rkey, "rkey 0x%x was closed instead of 0x%x", wc.invalidated_rkey, window.rkey);
		for (int i = 0; i < 2000; i++)
			CHECK(target[i] == (i >= 100 && i < 1100 ? 0x5a : 0), "byte %d is 0x%02x after a WRITE through a window", i, target[i]);
		barrier(77);
		barrier(78);
		CHECK(target[100] == 0x5a, "a closed window let a WRITE through");
		int error = ibv_dealloc_mw(mw);
		CHECK(error == 0, "ibv_dealloc_mw: %s", strerror(error));
	}
}

/* ---- Main ------------------------------------------------------------------------------------------------------------ */

static void set_up(void)
{
	node = node_open();
	if (opt.events) {
		channel = ibv_create_comp_channel(node.context);
		CHECK(channel != NULL, "ibv_create_comp_channel: %s", strerror(errno));
	}
	send_cq = cq_make(&node, 256, channel);
	recv_cq = cq_make(&node, 256, channel);
	if (opt.srq) {
		struct ibv_srq_init_attr attr = {.attr = {.max_wr = 64, .max_sge = 4}};

		srq = ibv_create_srq(node.pd, &attr);
		CHECK(srq != NULL, "ibv_create_srq: %s", strerror(errno));
	}
	qp = qp_make(&node, send_cq, recv_cq, srq, 64);
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	CHECK(ibv_query_qp(qp, &attr, IBV_QP_CAP, &init) == 0, "ibv_query_qp failed");
	CHECK(init.cap.max_inline_data >= 200, "max_inline_data is %u although 200 were asked for and granted", init.cap.max_inline_data);
	max_inline = 200;
	local = pages(SPACE);
	target = pages(SPACE);
	model = pages(SPACE);
	local_mr = mr_make(node.pd, local, SPACE, IBV_ACCESS_LOCAL_WRITE);
	target_mr = mr_make(node.pd, target, SPACE, ALL_REMOTE | IBV_ACCESS_MW_BIND);
	peer = connect_with(&node, qp, target_mr, &usual);
	mtu = 128u << (node.port.active_mtu < peer.mtu ? node.port.active_mtu : peer.mtu);
	if (opt.type == IBV_QPT_UD)
		ah = ah_make(node.pd, &peer);
}

static void tear_down(void)
{
	CHECK(!ah || ibv_destroy_ah(ah) == 0, "ibv_destroy_ah failed");
	CHECK(ibv_destroy_qp(qp) == 0, "ibv_destroy_qp failed");
	CHECK(!srq || ibv_destroy_srq(srq) == 0, "ibv_destroy_srq failed");
	CHECK(ibv_destroy_cq(send_cq) == 0, "ibv_destroy_cq failed");
	CHECK(ibv_destroy_cq(recv_cq) == 0, "ibv_destroy_cq failed");
	CHECK(!channel || ibv_destroy_comp_channel(channel) == 0, "ibv_destroy_comp_channel failed");
	CHECK(ibv_dereg_mr(local_mr) == 0 && ibv_dereg_mr(target_mr) == 0, "ibv_dereg_mr failed");
	CHECK(ibv_dealloc_pd(node.pd) == 0, "ibv_dealloc_pd failed");
	CHECK(ibv_close_device(node.context) == 0, "ibv_close_device failed");
}

int main(int argc, char **argv)
{
	parse_options(argc, argv);
	side_open();
	uint64_t other;
	swap(&opt.seed, &other, sizeof(other));
	CHECK(opt.seed == other, "the ends have different seeds");
	random_state = mix(opt.seed);
	set_up();
	each_opcode_and_size();
	mixtures(opt.count ? (unsigned)opt.count : 200);
	if (opt.type == IBV_QPT_RC && !opt.srq && !opt.events)
		invalidate();
	barrier(999);
	tear_down();
	ok("seed %" PRIu64 ", %lu batches, %lu lost", opt.seed, batches, lost);
	return 0;
}
