/* Tag matching, for operations.c: a shared receive queue that matches tags, and a requester with an ordinary queue pair. */
#ifndef TAGS_H
#define TAGS_H

#define TAG 0x1234u
#define OTHER_TAG 0x4321u
#define APP_CTX 0xfe440ce2u
/* Where tagged data goes, and the ordinary receives. */
#define TAGGED (TARGET + 1000)
#define UNTAGGED (TARGET + 16384)

static struct ibv_cq_ex *tm_cq;
static struct ibv_srq *tm_srq;

static bool has_tags(bool requests)
{
	struct ibv_device_attr_ex attr;

	EXPECT(ibv_query_device_ex(node.context, NULL, &attr) == 0, "ibv_query_device_ex failed");
	return requests || attr.tm_caps.flags & IBV_TM_CAP_RC;
}

static void tm_open(void)
{
	struct ibv_cq_init_attr_ex of_cq = {.cqe = 64, .wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_TM_INFO};
	struct ibv_srq_init_attr_ex of_srq = {
		.attr = {.max_wr = 16, .max_sge = 1},
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_TM,
		.srq_type = IBV_SRQT_TM,
		.pd = node.pd,
		.tm_cap = {.max_num_tags = 8, .max_ops = 8},
	};

	tm_cq = ibv_create_cq_ex(node.context, &of_cq);
	EXPECT(tm_cq != NULL, "ibv_create_cq_ex: %s", strerror(errno));
	of_srq.cq = ibv_cq_ex_to_cq(tm_cq);
	tm_srq = ibv_create_srq_ex(node.context, &of_srq);
	EXPECT(tm_srq != NULL, "ibv_create_srq_ex: %s", strerror(errno));
	qp = qp_of(IBV_QPT_RC, 0, tm_srq);
}

static void tm_close(void)
{
	part(qp);
	EXPECT(ibv_destroy_srq(tm_srq) == 0 && ibv_destroy_cq(ibv_cq_ex_to_cq(tm_cq)) == 0, "ibv_destroy_srq or ibv_destroy_cq failed");
}

/* The next completion of the queue must be this; tag 0: it tells of none. */
static void tm_done(uint64_t wr_id, enum ibv_wc_opcode opcode, unsigned flags, uint64_t tag, const char *what)
{
	struct ibv_poll_cq_attr attr = {0};
	struct ibv_wc_tm_info info = {0};
	double end = now_s() + PATIENCE_S;
	int error;

	while ((error = ibv_start_poll(tm_cq, &attr)) == ENOENT)
		EXPECT(now_s() < end, "%s: no completion within %d s", what, PATIENCE_S);
	EXPECT(error == 0, "%s: ibv_start_poll: %s", what, strerror(error));
	enum ibv_wc_opcode is = ibv_wc_read_opcode(tm_cq);
	unsigned has = ibv_wc_read_wc_flags(tm_cq);
	EXPECT(tm_cq->status == IBV_WC_SUCCESS, "%s: %s", what, ibv_wc_status_str(tm_cq->status));
	EXPECT(tm_cq->wr_id == wr_id && is == opcode && has == flags, "%s: request %" PRIu64 ", opcode %u, flags 0x%x", what, tm_cq->wr_id, is, has);
	ibv_wc_read_tm_info(tm_cq, &info);
	EXPECT(tag == 0 || (info.tag == tag && info.priv == APP_CTX), "%s: tag 0x%" PRIx64 ", context 0x%x", what, info.tag, info.priv);
	ibv_end_poll(tm_cq);
}

static void tm_operate(struct ibv_ops_wr *wr, const char *what)
{
	struct ibv_ops_wr *bad;
	int error = ibv_post_srq_ops(tm_srq, wr, &bad);

	EXPECT(error == 0, "ibv_post_srq_ops: %s: %s", what, strerror(error));
}

/* A buffer for messages of a tag; gives its handle. */
static uint32_t tm_add(uint64_t tag, uint32_t offset, uint32_t length)
{
	struct ibv_sge sge = {(uintptr_t)memory + offset, length, mr->lkey};
	struct ibv_ops_wr wr = {.wr_id = 50, .opcode = IBV_WR_TAG_ADD, .flags = IBV_OPS_SIGNALED};

	wr.tm.add.recv_wr_id = tag;
	wr.tm.add.sg_list = &sge;
	wr.tm.add.num_sge = 1;
	wr.tm.add.tag = tag;
	wr.tm.add.mask = UINT64_MAX;
	tm_operate(&wr, "adding a tag");
	tm_done(50, IBV_WC_TM_ADD, 0, 0, "adding a tag");
	return wr.tm.handle;
}

/* A message with its header, from the requester's memory at offset on: there it stands from now on. */
static void tm_send(enum ibv_tmh_op op, uint64_t tag, const struct ibv_rvh *rendezvous, uint32_t offset, uint32_t length)
{
	struct ibv_tmh header = {.opcode = op, .app_ctx = htonl(APP_CTX), .tag = htobe64(tag)};

	memcpy(memory + offset, &header, sizeof(header));
	if (rendezvous)
		memcpy(memory + offset + sizeof(header), rendezvous, sizeof(*rendezvous));
	memcpy(expected + offset, memory + offset, length);
	one(qp, IBV_WR_SEND, offset, length, 0, 0, IBV_WC_SUCCESS, "SEND with a tag");
}

/* A header as the responder finds it in an ordinary receive, and the rest of a message whose bytes are from offset on. */
static void tm_expect_whole(uint32_t at, enum ibv_tmh_op op, uint64_t tag, uint32_t offset, uint32_t length)
{
	struct ibv_tmh header = {.opcode = op, .app_ctx = htonl(APP_CTX), .tag = htobe64(tag)};

	peers(offset, expected + at, length);
	memcpy(expected + at, &header, sizeof(header));
}

static void request_tags(void)
{
	qp = qp_of(IBV_QPT_RC, 0, NULL);
	meet(qp);
	barrier(20);
	tm_send(IBV_TMH_EAGER, TAG, NULL, 0, 800);
	tm_send(IBV_TMH_EAGER, TAG, NULL, 1000, 5000);
	barrier(21);
	tm_send(IBV_TMH_EAGER, OTHER_TAG, NULL, 8192, 700);
	barrier(22);
	tm_send(IBV_TMH_NO_TAG, TAG, NULL, 16384, 600);
	barrier(23);
	/* To a tag that was taken back. */
	tm_send(IBV_TMH_EAGER, TAG + 1, NULL, 24576, 500);
	part(qp);
}

static void respond_tags(void)
{
	tm_open();
	meet(qp);
	for (uint32_t i = 0; i < 4; i++)
		receive_at(qp, tm_srq, UNTAGGED + i * 8192, 8192);
	tm_add(TAG, TAGGED, 1000);
	tm_add(TAG, TAGGED + 1000, 6000);
	uint32_t handle = tm_add(TAG + 1, TAGGED + 8000, 100);
	barrier(20);
	tm_done(TAG, IBV_WC_TM_RECV, IBV_WC_TM_MATCH | IBV_WC_TM_DATA_VALID, TAG, "a message whose tag matches");
	peers(sizeof(struct ibv_tmh), expected + TAGGED, 800 - sizeof(struct ibv_tmh));
	/* In several packets: the match and the end of the data are told apart. */
	tm_done(TAG, IBV_WC_TM_RECV, IBV_WC_TM_MATCH, TAG, "a long message whose tag matches");
	tm_done(TAG, IBV_WC_TM_RECV, IBV_WC_TM_DATA_VALID, 0, "the data of a long message");
	peers(1000 + sizeof(struct ibv_tmh), expected + TAGGED + 1000, 5000 - sizeof(struct ibv_tmh));
	barrier(21);
	tm_done(UNTAGGED, IBV_WC_TM_RECV, 0, 0, "a message of an unexpected tag");
	tm_expect_whole(UNTAGGED, IBV_TMH_EAGER, OTHER_TAG, 8192, 700);
	struct ibv_ops_wr sync = {.wr_id = 51, .opcode = IBV_WR_TAG_SYNC, .flags = IBV_OPS_SIGNALED | IBV_OPS_TM_SYNC};
	sync.tm.unexpected_cnt = 1;
	tm_operate(&sync, "telling how many were unexpected");
	tm_done(51, IBV_WC_TM_SYNC, 0, 0, "telling how many were unexpected");
	barrier(22);
	tm_done(UNTAGGED + 8192, IBV_WC_TM_NO_TAG, 0, 0, "a message without a tag");
	tm_expect_whole(UNTAGGED + 8192, IBV_TMH_NO_TAG, TAG, 16384, 600);
	struct ibv_ops_wr take_back = {.wr_id = 52, .opcode = IBV_WR_TAG_DEL, .flags = IBV_OPS_SIGNALED};
	take_back.tm.handle = handle;
	tm_operate(&take_back, "taking a tag back");
	tm_done(52, IBV_WC_TM_DEL, 0, 0, "taking a tag back");
	barrier(23);
	tm_done(UNTAGGED + 2 * 8192, IBV_WC_TM_RECV, 0, 0, "a message of a tag that was taken back");
	tm_expect_whole(UNTAGGED + 2 * 8192, IBV_TMH_EAGER, TAG + 1, 24576, 500);
	tm_close();
}

/* Rendezvous: the message says where the data is; the responder's device reads it, and tells the requester. */
#define RENDEZVOUS_LENGTH 40000u

static bool has_rendezvous(bool requests)
{
	return has_tags(requests);
}

static void request_rendezvous(void)
{
	struct ibv_rvh where = {.va = htobe64((uintptr_t)memory + 8192), .rkey = htonl(mr->rkey), .len = htonl(RENDEZVOUS_LENGTH)};
	struct ibv_tmh header;

	qp = qp_of(IBV_QPT_RC, 0, NULL);
	meet(qp);
	receive_at(qp, NULL, TARGET, 64);
	barrier(20);
	tm_send(IBV_TMH_RNDV, TAG, &where, 0, sizeof(header) + sizeof(where));
	struct ibv_wc wc = done(recv_cq, IBV_WC_RECV, "the end of the rendezvous");
	EXPECT(wc.byte_len >= sizeof(header), "the end of the rendezvous is told in %u bytes", wc.byte_len);
	memcpy(&header, memory + TARGET, sizeof(header));
	EXPECT(header.opcode == IBV_TMH_FIN && be64toh(header.tag) == TAG && ntohl(header.app_ctx) == APP_CTX,
	       "the end of the rendezvous has opcode %u and tag 0x%" PRIx64, header.opcode, (uint64_t)be64toh(header.tag));
	memcpy(expected + TARGET, memory + TARGET, wc.byte_len);
	part(qp);
}

static void respond_rendezvous(void)
{
	tm_open();
	meet(qp);
	receive_at(qp, tm_srq, UNTAGGED, 8192);
	tm_add(TAG, TAGGED, RENDEZVOUS_LENGTH + 100);
	barrier(20);
	tm_done(TAG, IBV_WC_TM_RECV, IBV_WC_TM_MATCH, TAG, "a rendezvous whose tag matches");
	tm_done(TAG, IBV_WC_TM_RECV, IBV_WC_TM_DATA_VALID, 0, "the data of the rendezvous");
	peers(8192, expected + TAGGED, RENDEZVOUS_LENGTH);
	tm_close();
}

#endif
