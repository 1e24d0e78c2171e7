/*
 * Whole frames between two hosts: RAW_PACKET queue pairs, flows of each kind, receive-side scaling. Needs CAP_NET_RAW, and interfaces that
 * lead to each other.
 */
#include "features.h"

#define FRAME 200u
#define ROOM 2048u
#define MAC_BYTES 6
#define ETH 14u
#define IPV4 20u
#define IPV6 40u
#define UDP 8u
#define TCP 20u
#define ETHERTYPE_TEST 0x88b5u /* for experiments: IEEE 802 */

enum network { NO_NETWORK, V4, V6 };

/* What a frame says, as far as flows look at it. */
struct form {
	uint8_t host; /* last byte of the destination's MAC and IP address */
	enum network network;
	uint8_t transport; /* IPPROTO_ */
	uint16_t port;
};

/* A flow, a frame that belongs to it, and one that differs just enough. */
struct kind {
	enum ibv_flow_spec_type specs[3];
	struct form belongs, differs;
};

static const struct kind by_ethernet = {{IBV_FLOW_SPEC_ETH}, {2, NO_NETWORK, 0, 0}, {3, NO_NETWORK, 0, 0}};
static const struct kind by_ipv4 = {{IBV_FLOW_SPEC_ETH, IBV_FLOW_SPEC_IPV4}, {2, V4, IPPROTO_UDP, 1000}, {2, V6, IPPROTO_UDP, 1000}};
static const struct kind by_ipv6 = {{IBV_FLOW_SPEC_ETH, IBV_FLOW_SPEC_IPV6}, {2, V6, IPPROTO_UDP, 1000}, {2, V4, IPPROTO_UDP, 1000}};
static const struct kind by_tcp = {{IBV_FLOW_SPEC_ETH, IBV_FLOW_SPEC_IPV4, IBV_FLOW_SPEC_TCP}, {2, V4, IPPROTO_TCP, 1000}, {2, V4, IPPROTO_UDP, 1000}};
static const struct kind by_udp = {{IBV_FLOW_SPEC_ETH, IBV_FLOW_SPEC_IPV4, IBV_FLOW_SPEC_UDP}, {2, V4, IPPROTO_UDP, 1000}, {2, V4, IPPROTO_UDP, 1001}};

static void put_mac(uint8_t *to, uint8_t host)
{
	memset(to, 0, MAC_BYTES);
	to[0] = 2; /* administered locally */
	to[MAC_BYTES - 1] = host;
}

static void put_v4(uint8_t *to, uint8_t host)
{
	memcpy(to, "\xc6\x33\x64", 3); /* 198.51.100.0/24: documentation, RFC 5737 */
	to[3] = host;
}

static void put_v6(uint8_t *to, uint8_t host)
{
	memset(to, 0, 16);
	memcpy(to, "\x20\x01\x0d\xb8", 4); /* 2001:db8::/32: documentation, RFC 3849 */
	to[15] = host;
}

static void put16(uint8_t *to, uint32_t value)
{
	to[0] = (uint8_t)(value >> 8);
	to[1] = (uint8_t)value;
}

/* A frame of this form; its last byte is number. */
static void make_frame(uint8_t *frame, const struct form *form, uint8_t number)
{
	uint8_t *ip = frame + ETH, *transport = ip + (form->network == V4 ? IPV4 : IPV6);
	uint32_t length = FRAME - ETH;

	memset(frame, 0x5a, FRAME);
	frame[FRAME - 1] = number;
	put_mac(frame, form->host);
	put_mac(frame + MAC_BYTES, 1);
	put16(frame + 2 * MAC_BYTES, form->network == V4 ? 0x0800 : form->network == V6 ? 0x86dd : ETHERTYPE_TEST);
	if (form->network == NO_NETWORK)
		return;
	if (form->network == V4) {
		memset(ip, 0, IPV4);
		ip[0] = 0x45;
		put16(ip + 2, length);
		ip[8] = 64;
		ip[9] = form->transport;
		put_v4(ip + 12, 1);
		put_v4(ip + 16, form->host);
	} else {
		memset(ip, 0, IPV6);
		ip[0] = 0x60;
		put16(ip + 4, length - IPV6);
		ip[6] = form->transport;
		ip[7] = 64;
		put_v6(ip + 8, 1);
		put_v6(ip + 24, form->host);
	}
	put16(transport, 999);
	put16(transport + 2, form->port);
	if (form->transport == IPPROTO_TCP)
		transport[12] = 5 << 4; /* its header's length in words */
}

/* ---- Rules ------------------------------------------------------------------------------------------------------------ */

/* A rule with room for three specifications. */
struct rule {
	struct ibv_flow_attr attr;
	uint8_t specs[3 * sizeof(struct ibv_flow_spec_ipv6)];
};

/* Appends a specification of the whole of what the form says of this layer. */
static uint16_t specify(uint8_t *to, enum ibv_flow_spec_type type, const struct form *form)
{
	struct ibv_flow_spec_eth eth = {.type = type, .size = sizeof(eth)};
	struct ibv_flow_spec_ipv4 v4 = {.type = type, .size = sizeof(v4)};
	struct ibv_flow_spec_ipv6 v6 = {.type = type, .size = sizeof(v6)};
	struct ibv_flow_spec_tcp_udp ports = {.type = type, .size = sizeof(ports)};

	switch (type) {
	case IBV_FLOW_SPEC_ETH:
		put_mac(eth.val.dst_mac, form->host);
		memset(eth.mask.dst_mac, 0xff, MAC_BYTES);
		memcpy(to, &eth, sizeof(eth));
		return eth.size;
	case IBV_FLOW_SPEC_IPV4:
		put_v4((uint8_t *)&v4.val.dst_ip, form->host);
		v4.mask.dst_ip = UINT32_MAX;
		memcpy(to, &v4, sizeof(v4));
		return v4.size;
	case IBV_FLOW_SPEC_IPV6:
		put_v6(v6.val.dst_ip, form->host);
		memset(v6.mask.dst_ip, 0xff, 16);
		memcpy(to, &v6, sizeof(v6));
		return v6.size;
	default:
		ports.val.dst_port = htons(form->port);
		ports.mask.dst_port = UINT16_MAX;
		memcpy(to, &ports, sizeof(ports));
		return ports.size;
	}
}

static struct ibv_flow *steer(struct ibv_qp *qp, const struct kind *kind)
{
	struct rule rule = {.attr = {.type = IBV_FLOW_ATTR_NORMAL, .size = sizeof(rule.attr), .port = 1}};

	for (unsigned i = 0; i < 3 && kind->specs[i]; i++) {
		rule.attr.size = (uint16_t)(rule.attr.size + specify((uint8_t *)&rule + rule.attr.size, kind->specs[i], &kind->belongs));
		rule.attr.num_of_specs++;
	}
	struct ibv_flow *flow = ibv_create_flow(qp, &rule.attr);
	EXPECT(flow != NULL, "ibv_create_flow: %s", strerror(errno));
	return flow;
}

/* ---- Both ends ---------------------------------------------------------------------------------------------------------- */

static bool has_frames(bool requests)
{
	(void)requests;
	return has_qp(IBV_QPT_RAW_PACKET, 0);
}

static void to_rts(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};

	for (; attr.qp_state <= IBV_QPS_RTS; attr.qp_state++) {
		int error = ibv_modify_qp(qp, &attr, IBV_QP_STATE | (attr.qp_state == IBV_QPS_INIT ? IBV_QP_PORT : 0));

		EXPECT(error == 0, "to state %d: %s", attr.qp_state, strerror(error));
	}
}

static void send_frame(struct ibv_qp *qp, const struct form *form, uint8_t number)
{
	struct ibv_sge sge = {(uintptr_t)memory, FRAME, mr->lkey};
	struct ibv_send_wr wr = {.wr_id = number, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;

	make_frame(memory, form, number);
	memcpy(expected, memory, FRAME);
	int error = ibv_post_send(qp, &wr, &bad);
	EXPECT(error == 0, "ibv_post_send: %s", strerror(error));
	done(send_cq, IBV_WC_SEND, "a frame");
}

/* Frames that belong to the flow, and between them such that do not. */
static void request_frames(const struct kind *kind)
{
	struct ibv_qp *qp = qp_of(IBV_QPT_RAW_PACKET, 0, NULL);

	to_rts(qp);
	barrier(60);
	for (uint8_t i = 0; i < 8; i++)
		send_frame(qp, i % 2 ? &kind->belongs : &kind->differs, i);
	part(qp);
}

static void respond_frames(const struct kind *kind)
{
	struct ibv_qp *qp = qp_of(IBV_QPT_RAW_PACKET, 0, NULL);

	to_rts(qp);
	for (uint32_t i = 0; i < 8; i++)
		receive_at(qp, NULL, TARGET + i * ROOM, ROOM);
	struct ibv_flow *flow = steer(qp, kind);
	barrier(60);
	/* Frames arrive in order: none between these was steered here. */
	for (uint8_t i = 1; i < 8; i += 2) {
		struct ibv_wc wc = done(recv_cq, IBV_WC_RECV, "a frame of the flow");

		EXPECT(wc.byte_len == FRAME, "a frame of %u bytes came", wc.byte_len);
		make_frame(expected + wc.wr_id, &kind->belongs, i);
	}
	EXPECT(ibv_destroy_flow(flow) == 0, "ibv_destroy_flow failed");
	part(qp);
}

#define FLOW(id)                                                                                                       \
	static void request_##id(void)                                                                                 \
	{                                                                                                              \
		request_frames(&id);                                                                                   \
	}                                                                                                              \
	static void respond_##id(void)                                                                                 \
	{                                                                                                              \
		respond_frames(&id);                                                                                   \
	}

FLOW(by_ethernet)
FLOW(by_ipv4)
FLOW(by_ipv6)
FLOW(by_tcp)
FLOW(by_udp)

/* ---- Timestamps ----------------------------------------------------------------------------------------------------------- */

static void request_timestamps(void)
{
	request_frames(&by_ethernet);
}

/* Completions of frames are stamped in their order. */
static void respond_timestamps(void)
{
	struct ibv_cq_init_attr_ex attr = {.cqe = 16, .wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK};
	struct ibv_cq_ex *cq = ibv_create_cq_ex(node.context, &attr);
	struct ibv_cq *usual_one = recv_cq;
	struct ibv_poll_cq_attr poll = {0};
	struct timespec now;

	EXPECT(cq != NULL, "ibv_create_cq_ex: %s", strerror(errno));
	recv_cq = ibv_cq_ex_to_cq(cq);
	struct ibv_qp *qp = qp_of(IBV_QPT_RAW_PACKET, 0, NULL);
	recv_cq = usual_one;
	to_rts(qp);
	for (uint32_t i = 0; i < 8; i++)
		receive_at(qp, NULL, TARGET + i * ROOM, ROOM);
	struct ibv_flow *flow = steer(qp, &by_ethernet);
	clock_gettime(CLOCK_REALTIME, &now);
	uint64_t before = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
	barrier(60);
	double end = now_s() + PATIENCE_S;
	for (uint8_t i = 1; i < 8; i += 2) {
		while (ibv_start_poll(cq, &poll) != 0)
			EXPECT(now_s() < end, "no frame within %d s", PATIENCE_S);
		uint64_t at = ibv_wc_read_completion_wallclock_ns(cq);
		clock_gettime(CLOCK_REALTIME, &now);
		EXPECT(at >= before && at <= (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec, "a frame came at %" PRIu64 ", after %" PRIu64, at, before);
		before = at;
		make_frame(expected + cq->wr_id, &by_ethernet.belongs, i);
		ibv_end_poll(cq);
	}
	EXPECT(ibv_destroy_flow(flow) == 0, "ibv_destroy_flow failed");
	part(qp);
	EXPECT(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) == 0, "ibv_destroy_cq failed");
}

/* ---- Receive-side scaling --------------------------------------------------------------------------------------------------- */

#define PORTS 16u
#define QUEUES 2

static struct form to_port(uint32_t i)
{
	return (struct form){2, V4, IPPROTO_UDP, (uint16_t)(2000 + i)};
}

/* Two frames to each port. */
static void request_spread(void)
{
	struct ibv_qp *qp = qp_of(IBV_QPT_RAW_PACKET, 0, NULL);

	to_rts(qp);
	barrier(60);
	for (uint8_t i = 0; i < 2 * PORTS; i++) {
		struct form form = to_port(i % PORTS);

		send_frame(qp, &form, i);
	}
	part(qp);
}

static struct ibv_wq *open_queue(struct ibv_cq *cq, uint32_t offset)
{
	struct ibv_wq_init_attr init = {.wq_type = IBV_WQT_RQ, .max_wr = 2 * PORTS, .max_sge = 1, .pd = node.pd, .cq = cq};
	struct ibv_wq *wq = ibv_create_wq(node.context, &init);
	struct ibv_wq_attr ready = {.attr_mask = IBV_WQ_ATTR_STATE, .wq_state = IBV_WQS_RDY};

	EXPECT(wq != NULL, "ibv_create_wq: %s", strerror(errno));
	EXPECT(ibv_modify_wq(wq, &ready) == 0, "ibv_modify_wq failed");
	for (uint32_t i = 0; i < 2 * PORTS; i++) {
		struct ibv_sge sge = {(uintptr_t)memory + offset + i * 1024, 1024, mr->lkey};
		struct ibv_recv_wr wr = {.wr_id = offset + i * 1024, .sg_list = &sge, .num_sge = 1}, *bad;

		EXPECT(ibv_post_wq_recv(wq, &wr, &bad) == 0, "ibv_post_wq_recv failed");
	}
	return wq;
}

static struct ibv_qp *qp_over(struct ibv_rwq_ind_table *table)
{
	static uint8_t key[40];
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_RAW_PACKET,
		.pd = node.pd,
		.rwq_ind_tbl = table,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_IND_TABLE | IBV_QP_INIT_ATTR_RX_HASH,
		.rx_hash_conf = {IBV_RX_HASH_FUNC_TOEPLITZ, sizeof(key), key, IBV_RX_HASH_DST_PORT_UDP},
	};

	pattern(key, 1, 0, sizeof(key));
	struct ibv_qp *qp = ibv_create_qp_ex(node.context, &init);
	EXPECT(qp != NULL, "ibv_create_qp_ex: %s", strerror(errno));
	return qp;
}

/* All frames come, those to a port to one queue, and each queue has some. */
static void receive_spread(struct ibv_cq *cqs[QUEUES])
{
	int queue_of[PORTS], frames[QUEUES] = {0};
	double end = now_s() + PATIENCE_S;
	struct ibv_wc wc;

	for (uint32_t i = 0; i < PORTS; i++)
		queue_of[i] = -1;
	while (frames[0] + frames[1] < 2 * (int)PORTS)
		for (int q = 0; q < QUEUES; q++) {
			EXPECT(now_s() < end, "%d frames within %d s", frames[0] + frames[1], PATIENCE_S);
			if (ibv_poll_cq(cqs[q], 1, &wc) != 1)
				continue;
			EXPECT(wc.status == IBV_WC_SUCCESS && wc.byte_len == FRAME, "%s of %u bytes", ibv_wc_status_str(wc.status), wc.byte_len);
			uint8_t number = memory[wc.wr_id + FRAME - 1];
			EXPECT(number < 2 * PORTS, "frame %u came, which nobody sent", number);
			struct form form = to_port(number % PORTS);
			make_frame(expected + wc.wr_id, &form, number);
			int *queue = &queue_of[number % PORTS];
			EXPECT(*queue == -1 || *queue == q, "frames to port %u came to both queues", form.port);
			*queue = q;
			frames[q]++;
		}
	EXPECT(frames[0] && frames[1], "%d and %d frames came", frames[0], frames[1]);
}

static void respond_spread(void)
{
	struct ibv_cq *cqs[QUEUES];
	struct ibv_wq *wqs[QUEUES];

	for (int q = 0; q < QUEUES; q++) {
		cqs[q] = cq_make(&node, 2 * PORTS, NULL);
		wqs[q] = open_queue(cqs[q], TARGET + (uint32_t)q * HALF / QUEUES);
	}
	struct ibv_rwq_ind_table_init_attr init = {.log_ind_tbl_size = 1, .ind_tbl = wqs};
	struct ibv_rwq_ind_table *table = ibv_create_rwq_ind_table(node.context, &init);
	EXPECT(table != NULL, "ibv_create_rwq_ind_table: %s", strerror(errno));
	struct ibv_qp *qp = qp_over(table);
	struct ibv_flow *flow = steer(qp, &by_ethernet);
	barrier(60);
	receive_spread(cqs);
	EXPECT(ibv_destroy_flow(flow) == 0, "ibv_destroy_flow failed");
	part(qp);
	EXPECT(ibv_destroy_rwq_ind_table(table) == 0, "ibv_destroy_rwq_ind_table failed");
	for (int q = 0; q < QUEUES; q++)
		EXPECT(ibv_destroy_wq(wqs[q]) == 0 && ibv_destroy_cq(cqs[q]) == 0, "ibv_destroy_wq or ibv_destroy_cq failed");
}

static const struct feature features[] = {
	{"flow-ethernet", has_frames, request_by_ethernet, respond_by_ethernet, 0},
	{"flow-ipv4", has_frames, request_by_ipv4, respond_by_ipv4, 0},
	{"flow-ipv6", has_frames, request_by_ipv6, respond_by_ipv6, 0},
	{"flow-tcp", has_frames, request_by_tcp, respond_by_tcp, 0},
	{"flow-udp", has_frames, request_by_udp, respond_by_udp, 0},
	{"frame-timestamps", has_frames, request_timestamps, respond_timestamps, 0},
	{"receive-side-scaling", has_frames, request_spread, respond_spread, 0},
};

int main(int argc, char **argv)
{
	parse_options(argc, argv);
	try_all(features, sizeof(features) / sizeof(features[0]));
	return 0;
}
