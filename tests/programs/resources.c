/*
 * Kinds of memory and of queues that verify.c does not use: regions that come about in other ways or change, domains, extended
 * completion queues, limits, sizes and rates.
 */
#include "features.h"
#include "kinds.h"

/* ---- Completion queues ------------------------------------------------------------------------------------------------ */

#define MESSAGES 5u
#define MESSAGE 900u

static struct ibv_cq_ex *cq_ex_try(uint64_t fields)
{
	struct ibv_cq_init_attr_ex attr = {.cqe = 64, .wc_flags = fields};

	return ibv_create_cq_ex(node.context, &attr);
}

static bool has_cq_ex_of(uint64_t fields)
{
	struct ibv_cq_ex *cq = cq_ex_try(fields);

	EXPECT(!cq || ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) == 0, "ibv_destroy_cq failed");
	return cq != NULL;
}

static bool has_cq_ex(bool requests)
{
	(void)requests;
	return has_cq_ex_of(IBV_WC_STANDARD_FLAGS);
}

static bool has_timestamps(bool requests)
{
	return requests || has_cq_ex_of(IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK);
}

/* A queue pair whose both completion queues are cq. */
static struct ibv_qp *qp_on(struct ibv_cq_ex *cq, enum ibv_qp_type type)
{
	struct ibv_qp_init_attr init = {
		.send_cq = ibv_cq_ex_to_cq(cq),
		.recv_cq = ibv_cq_ex_to_cq(cq),
		.qp_type = type,
		.cap = {.max_send_wr = 32, .max_recv_wr = 32, .max_send_sge = 1, .max_recv_sge = 1},
	};
	struct ibv_qp *qp = ibv_create_qp(node.pd, &init);

	EXPECT(qp != NULL, "ibv_create_qp: %s", strerror(errno));
	return qp;
}

/* Begins to poll when a completion is there. */
static void start_poll(struct ibv_cq_ex *cq)
{
	struct ibv_poll_cq_attr attr = {0};
	double end = now_s() + PATIENCE_S;
	int error;

	while ((error = ibv_start_poll(cq, &attr)) == ENOENT)
		EXPECT(now_s() < end, "no completion within %d s", PATIENCE_S);
	EXPECT(error == 0, "ibv_start_poll: %s", strerror(error));
}

static void send_messages(struct ibv_qp *qp, struct ibv_ah *ah)
{
	for (uint32_t i = 0; i < MESSAGES; i++) {
		struct ibv_sge sge = {(uintptr_t)memory + i * 1024, MESSAGE, mr->lkey};
		struct ibv_send_wr wr = {.wr_id = i, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_IMM, .send_flags = IBV_SEND_SIGNALED}, *bad;

		wr.imm_data = htonl(i + 7);
		if (ah) {
			wr.wr.ud.ah = ah;
			wr.wr.ud.remote_qpn = peer.qpn;
			wr.wr.ud.remote_qkey = QKEY;
		}
		int error = ibv_post_send(qp, &wr, &bad);
		EXPECT(error == 0, "ibv_post_send: %s", strerror(error));
	}
}

static void check_sent(struct ibv_cq_ex *cq, const struct ibv_qp *qp, uint32_t i)
{
	EXPECT(cq->status == IBV_WC_SUCCESS, "message %u: %s", i, ibv_wc_status_str(cq->status));
	EXPECT(cq->wr_id == i && ibv_wc_read_opcode(cq) == IBV_WC_SEND, "completion of request %" PRIu64 " with opcode %u", cq->wr_id, ibv_wc_read_opcode(cq));
	EXPECT(ibv_wc_read_qp_num(cq) == qp->qp_num, "the completion names QP 0x%x", ibv_wc_read_qp_num(cq));
}

static void check_received(struct ibv_cq_ex *cq, const struct ibv_qp *qp, uint32_t i)
{
	bool ud = qp->qp_type == IBV_QPT_UD;
	uint32_t header = ud ? 40 : 0, at = TARGET + i * 1024;
	unsigned flags = ibv_wc_read_wc_flags(cq);

	EXPECT(cq->status == IBV_WC_SUCCESS && cq->wr_id == at, "receive %" PRIu64 ": %s", cq->wr_id, ibv_wc_status_str(cq->status));
	EXPECT(ibv_wc_read_opcode(cq) == IBV_WC_RECV, "a receive has opcode %u", ibv_wc_read_opcode(cq));
	EXPECT(ibv_wc_read_byte_len(cq) == MESSAGE + header, "a receive says %u bytes", ibv_wc_read_byte_len(cq));
	EXPECT(flags & IBV_WC_WITH_IMM && ibv_wc_read_imm_data(cq) == htonl(i + 7), "flags 0x%x, immediate 0x%x", flags, ntohl(ibv_wc_read_imm_data(cq)));
	EXPECT(ibv_wc_read_qp_num(cq) == qp->qp_num, "the receive names QP 0x%x", ibv_wc_read_qp_num(cq));
	EXPECT(!ud || (ibv_wc_read_src_qp(cq) == peer.qpn && flags & IBV_WC_GRH), "from QP 0x%x, flags 0x%x", ibv_wc_read_src_qp(cq), flags);
	memcpy(expected + at, memory + at, header);
	peers(i * 1024, expected + at + header, MESSAGE);
}

/* All messages' completions, as many of them in a batch as are there. (On rxe one by one: its ibv_next_poll and ibv_end_poll both step on
   at the end of a batch.) */
static void take_all(struct ibv_cq_ex *cq, const struct ibv_qp *qp, void (*check)(struct ibv_cq_ex *, const struct ibv_qp *, uint32_t))
{
	for (uint32_t i = 0; i < MESSAGES;) {
		start_poll(cq);
		do {
			EXPECT(i < MESSAGES, "one completion too many");
			check(cq, qp, i++);
		} while (!is_rxe() && ibv_next_poll(cq) == 0);
		ibv_end_poll(cq);
	}
}

static void request_to_cq_ex(enum ibv_qp_type type)
{
	struct ibv_cq_ex *cq = cq_ex_try(IBV_WC_STANDARD_FLAGS);
	struct ibv_qp *qp = qp_on(cq, type);
	struct ibv_ah *ah = NULL;

	meet(qp);
	if (type == IBV_QPT_UD)
		ah = ah_make(node.pd, &peer);
	barrier(40);
	send_messages(qp, ah);
	take_all(cq, qp, check_sent);
	part(qp);
	EXPECT(!ah || ibv_destroy_ah(ah) == 0, "ibv_destroy_ah failed");
	EXPECT(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) == 0, "ibv_destroy_cq failed");
}

static void respond_to_cq_ex(enum ibv_qp_type type)
{
	struct ibv_cq_ex *cq = cq_ex_try(IBV_WC_STANDARD_FLAGS);
	struct ibv_qp *qp = qp_on(cq, type);

	meet(qp);
	for (uint32_t i = 0; i < MESSAGES; i++)
		receive_at(qp, NULL, TARGET + i * 1024, 1024);
	barrier(40);
	take_all(cq, qp, check_received);
	part(qp);
	EXPECT(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) == 0, "ibv_destroy_cq failed");
}

static void request_cq_ex_rc(void)
{
	request_to_cq_ex(IBV_QPT_RC);
}

static void respond_cq_ex_rc(void)
{
	respond_to_cq_ex(IBV_QPT_RC);
}

static void request_cq_ex_ud(void)
{
	request_to_cq_ex(IBV_QPT_UD);
}

static void respond_cq_ex_ud(void)
{
	respond_to_cq_ex(IBV_QPT_UD);
}

static void request_timestamps(void)
{
	struct ibv_qp *qp = qp_of(IBV_QPT_RC, 0, NULL);

	meet(qp);
	barrier(40);
	send_messages(qp, NULL);
	for (uint32_t i = 0; i < MESSAGES; i++)
		done(send_cq, IBV_WC_SEND, "SEND with immediate");
	part(qp);
}

/* The device's clock, in nanoseconds as Ferroce's counts. */
static uint64_t device_clock(void)
{
	struct ibv_values_ex values = {.comp_mask = IBV_VALUES_MASK_RAW_CLOCK};
	int error = ibv_query_rt_values_ex(node.context, &values);

	EXPECT(error == 0, "ibv_query_rt_values_ex: %s", strerror(error));
	return (uint64_t)values.raw_clock.tv_sec * 1000000000u + (uint64_t)values.raw_clock.tv_nsec;
}

static uint64_t wall_clock(void)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Completions lie in order between the moment when nothing was sent and the present, by both clocks. */
static void respond_timestamps(void)
{
	struct ibv_cq_ex *cq = cq_ex_try(IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK);
	struct ibv_qp *qp = qp_on(cq, IBV_QPT_RC);

	meet(qp);
	for (uint32_t i = 0; i < MESSAGES; i++)
		receive_at(qp, NULL, TARGET + i * 1024, 1024);
	uint64_t device = device_clock(), wall = wall_clock();
	barrier(40);
	for (uint32_t i = 0; i < MESSAGES; i++) {
		start_poll(cq);
		check_received(cq, qp, i);
		uint64_t at = ibv_wc_read_completion_ts(cq), wall_at = ibv_wc_read_completion_wallclock_ns(cq);
		EXPECT(at >= device && at <= device_clock(), "message %u: a timestamp of %" PRIu64 " after %" PRIu64, i, at, device);
		EXPECT(wall_at >= wall && wall_at <= wall_clock(), "message %u: by the wall clock %" PRIu64 " after %" PRIu64, i, wall_at, wall);
		device = at;
		wall = wall_at;
		ibv_end_poll(cq);
	}
	part(qp);
	EXPECT(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) == 0, "ibv_destroy_cq failed");
}

static bool has_all(bool requests)
{
	(void)requests;
	return true;
}

static void request_resized_cq(void)
{
	request_timestamps();
}

/* A queue is made larger, and smaller, while completions are in it. */
static void respond_resized_cq(void)
{
	struct ibv_cq *whole = recv_cq;

	recv_cq = cq_make(&node, MESSAGES, NULL);
	struct ibv_qp *qp = qp_of(IBV_QPT_RC, 0, NULL);
	meet(qp);
	for (uint32_t i = 0; i < MESSAGES; i++)
		receive_at(qp, NULL, TARGET + i * 1024, 1024);
	barrier(40);
	for (uint32_t i = 0; i < MESSAGES; i++) {
		int error = i == 1 ? ibv_resize_cq(recv_cq, 100) : i == 3 ? ibv_resize_cq(recv_cq, MESSAGES) : 0;

		EXPECT(error == 0, "ibv_resize_cq: %s", strerror(error));
		struct ibv_wc wc = done(recv_cq, IBV_WC_RECV, "a receive");
		EXPECT(wc.wr_id == TARGET + i * 1024 && wc.byte_len == MESSAGE && wc.imm_data == htonl(i + 7), "receive %" PRIu64 " of %u bytes", wc.wr_id, wc.byte_len);
		peers(i * 1024, expected + wc.wr_id, MESSAGE);
	}
	part(qp);
	EXPECT(ibv_destroy_cq(recv_cq) == 0, "ibv_destroy_cq failed");
	recv_cq = whole;
}

/* ---- Shared receive queues --------------------------------------------------------------------------------------------- */

#define FIRST 3u
#define REST 30u

static bool of_port(enum ibv_event_type type)
{
	return type == IBV_EVENT_PORT_ACTIVE || type == IBV_EVENT_PORT_ERR || type == IBV_EVENT_GID_CHANGE;
}

/* The next event of the device that is not about its port. */
static void await_event(enum ibv_event_type type)
{
	struct pollfd fd = {.fd = node.context->async_fd, .events = POLLIN};
	struct ibv_async_event event;

	do {
		EXPECT(poll(&fd, 1, PATIENCE_S * 1000) == 1, "no event %s within %d s", ibv_event_type_str(type), PATIENCE_S);
		EXPECT(ibv_get_async_event(node.context, &event) == 0, "ibv_get_async_event: %s", strerror(errno));
		ibv_ack_async_event(&event);
	} while (of_port(event.event_type));
	EXPECT(event.event_type == type, "event %s instead of %s", ibv_event_type_str(event.event_type), ibv_event_type_str(type));
}

static void request_srq_limit(void)
{
	struct ibv_qp *qp = qp_of(IBV_QPT_RC, 0, NULL);

	meet(qp);
	barrier(40);
	for (uint32_t i = 0; i < FIRST + REST; i++) {
		if (i == FIRST)
			barrier(41);
		one(qp, IBV_WR_SEND, i * 1024, 1000, 0, 0, IBV_WC_SUCCESS, "SEND");
	}
	part(qp);
}

static void respond_srq_limit(void)
{
	struct ibv_srq_init_attr init = {.attr = {.max_wr = 8, .max_sge = 1}};
	struct ibv_srq *srq = ibv_create_srq(node.pd, &init);
	struct ibv_srq_attr attr = {.srq_limit = 3};

	EXPECT(srq != NULL, "ibv_create_srq: %s", strerror(errno));
	struct ibv_qp *qp = qp_of(IBV_QPT_RC, 0, srq);
	meet(qp);
	for (uint32_t i = 0; i < FIRST + 2; i++)
		receive_at(qp, srq, TARGET + i * 1024, 1024);
	int error = ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT);
	EXPECT(error == 0, "ibv_modify_srq, srq_limit: %s", strerror(error));
	barrier(40);
	await_event(IBV_EVENT_SRQ_LIMIT_REACHED);
	EXPECT(ibv_query_srq(srq, &attr) == 0 && attr.srq_limit == 0, "after its event the limit is %u", attr.srq_limit);
	attr.max_wr = 64;
	error = ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR);
	EXPECT(error == 0, "ibv_modify_srq, max_wr: %s", strerror(error));
	for (uint32_t i = FIRST + 2; i < FIRST + REST; i++)
		receive_at(qp, srq, TARGET + i * 1024, 1024);
	barrier(41);
	for (uint32_t i = 0; i < FIRST + REST; i++) {
		struct ibv_wc wc = done(recv_cq, IBV_WC_RECV, "a receive");

		EXPECT(wc.wr_id == TARGET + i * 1024 && wc.byte_len == 1000, "receive %" PRIu64 " of %u bytes", wc.wr_id, wc.byte_len);
		peers(i * 1024, expected + wc.wr_id, 1000);
	}
	struct ibv_qp_attr to_error = {.qp_state = IBV_QPS_ERR};
	EXPECT(ibv_modify_qp(qp, &to_error, IBV_QP_STATE) == 0, "to ERR failed");
	/* rxe says it only after an error that a request brought. */
	if (!is_rxe())
		await_event(IBV_EVENT_QP_LAST_WQE_REACHED);
	part(qp);
	EXPECT(ibv_destroy_srq(srq) == 0, "ibv_destroy_srq failed");
}

/* ---- Regions of other kinds under receives ------------------------------------------------------------------------------- */

/* Does something with a region of this kind in the place of the usual one. */
static void with_kind(int access, void (*act)(void))
{
	struct ibv_mr *usual_one = mr;

	mr = mr_make(node.pd, memory, SPACE, ALL_REMOTE | access);
	act();
	EXPECT(ibv_dereg_mr(mr) == 0, "ibv_dereg_mr failed");
	mr = usual_one;
}

static void respond_relaxed_ud(void)
{
	with_kind(IBV_ACCESS_RELAXED_ORDERING, respond_cq_ex_ud);
}

static bool has_on_demand_ud(bool requests)
{
	struct ibv_device_attr_ex attr;

	EXPECT(ibv_query_device_ex(node.context, NULL, &attr) == 0, "ibv_query_device_ex failed");
	return requests || (attr.odp_caps.general_caps & IBV_ODP_SUPPORT && attr.odp_caps.per_transport_caps.ud_odp_caps & IBV_ODP_SUPPORT_RECV);
}

static void respond_on_demand_ud(void)
{
	with_kind(IBV_ACCESS_ON_DEMAND, respond_cq_ex_ud);
}

static void respond_on_demand_srq(void)
{
	with_kind(IBV_ACCESS_ON_DEMAND, respond_srq_limit);
}

/* ---- Queue pairs ---------------------------------------------------------------------------------------------------------- */

static bool has_pacing(bool requests)
{
	struct ibv_device_attr_ex attr;

	EXPECT(ibv_query_device_ex(node.context, NULL, &attr) == 0, "ibv_query_device_ex failed");
	return !requests || attr.packet_pacing_caps.supported_qpts & 1 << IBV_QPT_RC;
}

/* The least rate by one verb and the highest by the other. */
static void request_pacing(void)
{
	struct ibv_qp *qp = qp_of(IBV_QPT_RC, 0, NULL);
	struct ibv_device_attr_ex attr;

	EXPECT(ibv_query_device_ex(node.context, NULL, &attr) == 0, "ibv_query_device_ex failed");
	struct ibv_qp_rate_limit_attr limit = {.rate_limit = attr.packet_pacing_caps.qp_rate_limit_min};
	struct ibv_qp_attr change = {.rate_limit = attr.packet_pacing_caps.qp_rate_limit_max};
	meet(qp);
	int error = ibv_modify_qp_rate_limit(qp, &limit);
	EXPECT(error == 0, "ibv_modify_qp_rate_limit: %s", strerror(error));
	one(qp, IBV_WR_RDMA_WRITE, 0, 30000, peer.addr + TARGET, peer.rkey, IBV_WC_SUCCESS, "slow WRITE");
	one(qp, IBV_WR_RDMA_WRITE, 30000, 30000, peer.addr + TARGET + 30000, peer.rkey, IBV_WC_SUCCESS, "slow WRITE");
	error = ibv_modify_qp(qp, &change, IBV_QP_RATE_LIMIT);
	EXPECT(error == 0, "ibv_modify_qp, rate_limit: %s", strerror(error));
	one(qp, IBV_WR_RDMA_WRITE, 60000, 30000, peer.addr + TARGET + 60000, peer.rkey, IBV_WC_SUCCESS, "fast WRITE");
	part(qp);
}

static void respond_pacing(void)
{
	struct ibv_qp *qp = qp_of(IBV_QPT_RC, 0, NULL);

	meet(qp);
	peers(0, expected + TARGET, 90000);
	part(qp);
}

/* rxe does not send on when it comes back from SQD. */
static bool has_drain(bool requests)
{
	return !requests || !is_rxe();
}

/* Takes what completions there are, all of success; gives their number. */
static int taken(void)
{
	struct ibv_wc wc;
	int count = 0;

	while (ibv_poll_cq(send_cq, 1, &wc) == 1) {
		EXPECT(wc.status == IBV_WC_SUCCESS, "a WRITE: %s", ibv_wc_status_str(wc.status));
		count++;
	}
	return count;
}

/* Draining: what was begun is done when the event comes; what was not (at least what is posted in SQD) waits for RTS. */
static void request_drain(void)
{
	struct ibv_qp *qp = qp_of(IBV_QPT_RC, 0, NULL);
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1};

	meet(qp);
	for (uint32_t i = 0; i < 8; i++)
		EXPECT(post_one(qp, IBV_WR_RDMA_WRITE, memory + i * 5000, mr->lkey, 5000, peer.addr + TARGET + i * 5000, peer.rkey) == 0, "ibv_post_send failed");
	EXPECT(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY) == 0, "to SQD failed");
	await_event(IBV_EVENT_SQ_DRAINED);
	EXPECT(post_one(qp, IBV_WR_RDMA_WRITE, memory + 40000, mr->lkey, 100, peer.addr + TARGET + 40000, peer.rkey) == 0, "ibv_post_send in SQD failed");
	sleep_ms(50);
	int before = taken();
	EXPECT(before <= 8, "a request that was posted in SQD was carried out");
	attr.qp_state = IBV_QPS_RTS;
	EXPECT(ibv_modify_qp(qp, &attr, IBV_QP_STATE) == 0, "back to RTS failed");
	for (int i = before; i < 9; i++)
		done(send_cq, IBV_WC_RDMA_WRITE, "a WRITE after SQD");
	part(qp);
}

static void respond_drain(void)
{
	struct ibv_qp *qp = qp_of(IBV_QPT_RC, 0, NULL);

	meet(qp);
	peers(0, expected + TARGET, 40100);
	part(qp);
}

/* ---- Main ------------------------------------------------------------------------------------------------------------------ */

#define FEATURE(id, name, rxe) {name, has_##id, request_##id, respond_##id, rxe}
#define REGION_OF(id, name, rxe) {name, has_##id, borrow, lend_##id, rxe}

static const struct feature features[] = {
	REGION_OF(relaxed, "relaxed-ordering", BOTH),
	REGION_OF(on_demand, "on-demand", REQUESTS),
	REGION_OF(implicit, "on-demand-implicit", REQUESTS),
	REGION_OF(device_memory, "device-memory", REQUESTS),
	REGION_OF(file, "file-region", REQUESTS),
	REGION_OF(imported, "imported-region", REQUESTS),
	FEATURE(reregistered, "reregistered", REQUESTS),
	FEATURE(null_region, "null-region", RESPONDS),
	FEATURE(parent_domain, "parent-domain", RESPONDS),
	{"cq-ex", has_cq_ex, request_cq_ex_rc, respond_cq_ex_rc, BOTH},
	{"cq-ex-ud", has_cq_ex, request_cq_ex_ud, respond_cq_ex_ud, BOTH},
	FEATURE(timestamps, "timestamps", REQUESTS),
	{"cq-resized", has_all, request_resized_cq, respond_resized_cq, BOTH},
	{"srq-limit", has_all, request_srq_limit, respond_srq_limit, BOTH},
	{"relaxed-ordering-ud", has_cq_ex, request_cq_ex_ud, respond_relaxed_ud, BOTH},
	{"on-demand-ud", has_on_demand_ud, request_cq_ex_ud, respond_on_demand_ud, REQUESTS},
	{"on-demand-srq", has_on_demand, request_srq_limit, respond_on_demand_srq, REQUESTS},
	FEATURE(pacing, "pacing", RESPONDS),
	{"drain", has_drain, request_drain, respond_drain, RESPONDS},
};

int main(int argc, char **argv)
{
	parse_options(argc, argv);
	try_all(features, sizeof(features) / sizeof(features[0]));
	return 0;
}
