/* RAW_PACKET queue pairs and flows: two ends of a veth pair in one process, so that frames really leave and arrive. Prints "good". */
#include <errno.h>
#include <linux/capability.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <infiniband/verbs.h>

#define TRUE(what) do { if (!(what)) { printf("%d: %s (errno %d)\n", __LINE__, #what, errno); exit(1); } } while (0)

enum { FRAME = 100, ROOM = 2048, RECEIVES = 8 };

struct end {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq_ex *cq;
	struct ibv_mr *mr;
	struct ibv_qp *qp;
	unsigned char memory[(RECEIVES + 1) * ROOM];
};

/* A frame from 02:..:01 to 02:..:02: VLAN tag or not, IPv4, UDP from port 1000 to `port`. */
static unsigned length(unsigned char *frame, int tag, unsigned port)
{
	static const unsigned char macs[12] = { 2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1 };
	unsigned char ip[20] = { 0x45, 0, 0, 80, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 99, 0, 1, 10, 99, 0, 2 };
	unsigned at = 12;

	memset(frame, 0x5a, FRAME + 4);
	memcpy(frame, macs, sizeof macs);
	if (tag >= 0) {
		frame[at++] = 0x81;
		frame[at++] = 0x00;
		frame[at++] = tag >> 8;
		frame[at++] = tag;
	}
	frame[at++] = 0x08;
	frame[at++] = 0x00;
	memcpy(frame + at, ip, sizeof ip);
	at += sizeof ip;
	frame[at++] = 1000 >> 8;
	frame[at++] = 1000 & 0xff;
	frame[at++] = port >> 8;
	frame[at++] = port;
	return tag >= 0 ? FRAME + 4 : FRAME;
}

static struct ibv_qp *queue_pair(struct end *end)
{
	struct ibv_qp_init_attr init = {
		.send_cq = ibv_cq_ex_to_cq(end->cq), .recv_cq = ibv_cq_ex_to_cq(end->cq), .qp_type = IBV_QPT_RAW_PACKET,
		.cap = { .max_send_wr = 4, .max_recv_wr = RECEIVES, .max_send_sge = 1, .max_recv_sge = 1 }, .sq_sig_all = 1,
	};
	return ibv_create_qp(end->pd, &init);
}

static void receive_at(struct end *end, unsigned slot)
{
	struct ibv_sge sge = { (uintptr_t)end->memory + (slot + 1) * ROOM, ROOM, end->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = slot, .sg_list = &sge, .num_sge = 1 }, *bad;

	TRUE(ibv_post_recv(end->qp, &wr, &bad) == 0);
}

static void ready(struct end *end)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };

	TRUE(ibv_modify_qp(end->qp, &attr, IBV_QP_STATE) == EINVAL);
	TRUE(ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_QKEY) == EINVAL);
	TRUE(ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_PORT) == 0);
	attr.qp_state = IBV_QPS_RTR;
	TRUE(ibv_modify_qp(end->qp, &attr, IBV_QP_STATE) == 0);
	attr.qp_state = IBV_QPS_RTS;
	TRUE(ibv_modify_qp(end->qp, &attr, IBV_QP_STATE) == 0);
	for (unsigned slot = 0; slot < RECEIVES; slot++)
		receive_at(end, slot);
}

static void open_end(struct end *end, struct ibv_context *context)
{
	struct ibv_cq_init_attr_ex attr = {
		.cqe = 64, .wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_FLOW_TAG | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP,
	};

	end->context = context;
	end->pd = ibv_alloc_pd(context);
	attr.channel = end->channel = ibv_create_comp_channel(context);
	end->cq = ibv_create_cq_ex(context, &attr);
	end->mr = ibv_reg_mr(end->pd, end->memory, sizeof end->memory, IBV_ACCESS_LOCAL_WRITE);
	TRUE(end->pd && end->cq && end->mr);
	end->qp = queue_pair(end);
	TRUE(end->qp && end->qp->qp_type == IBV_QPT_RAW_PACKET);
	ready(end);
}

static void post(struct end *end, unsigned len, unsigned opcode, int status)
{
	struct ibv_sge sge = { (uintptr_t)end->memory, len, end->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 77, .sg_list = &sge, .num_sge = 1, .opcode = opcode }, *bad;

	TRUE(ibv_post_send(end->qp, &wr, &bad) == status);
}

/* Waits for a completion; the time only keeps a fault from hanging. */
static void await(struct end *end, uint64_t *wr_id, enum ibv_wc_opcode *opcode, uint32_t *len, uint32_t *tag)
{
	struct ibv_poll_cq_attr attr = { 0 };
	time_t give_up = time(NULL) + 60;

	while (ibv_start_poll(end->cq, &attr) != 0)
		TRUE(time(NULL) < give_up);
	TRUE(end->cq->status == IBV_WC_SUCCESS);
	*wr_id = end->cq->wr_id;
	*opcode = ibv_wc_read_opcode(end->cq);
	*len = ibv_wc_read_byte_len(end->cq);
	*tag = ibv_wc_read_flow_tag(end->cq);
	TRUE(ibv_wc_read_completion_ts(end->cq) != 0);
	ibv_end_poll(end->cq);
}

static void send_frame(struct end *end, int tag, unsigned port)
{
	uint64_t wr_id;
	enum ibv_wc_opcode opcode;
	uint32_t len, flow_tag;

	post(end, length(end->memory, tag, port), IBV_WR_SEND, 0);
	await(end, &wr_id, &opcode, &len, &flow_tag);
	TRUE(wr_id == 77 && opcode == IBV_WC_SEND);
}

/* The frame that arrived is the one that was sent; its flow had this tag. */
static void arrived(struct end *end, int tag, unsigned port, uint32_t flow_tag)
{
	unsigned char sent[FRAME + 4];
	uint64_t wr_id;
	enum ibv_wc_opcode opcode;
	uint32_t len, found;

	await(end, &wr_id, &opcode, &len, &found);
	TRUE(opcode == IBV_WC_RECV && len == length(sent, tag, port) && found == flow_tag);
	TRUE(memcmp(end->memory + (wr_id + 1) * ROOM, sent, len) == 0);
	receive_at(end, wr_id);
}

static void *send_later(void *end)
{
	usleep(20000);
	send_frame(end, -1, 4000);
	return NULL;
}

/* A frame wakes a program that sleeps in a completion channel. */
static void woken_by_a_frame(struct end *a, struct end *b, uint32_t flow_tag)
{
	struct ibv_cq *cq;
	void *context;
	pthread_t sender;

	for (int i = 0; i < 3; i++) {
		TRUE(ibv_req_notify_cq(ibv_cq_ex_to_cq(b->cq), 0) == 0);
		TRUE(pthread_create(&sender, NULL, send_later, a) == 0);
		TRUE(ibv_get_cq_event(b->channel, &cq, &context) == 0 && cq == ibv_cq_ex_to_cq(b->cq));
		ibv_ack_cq_events(cq, 1);
		arrived(b, -1, 4000, flow_tag);
		pthread_join(sender, NULL);
	}
}

struct rule {
	struct ibv_flow_attr attr;
	struct ibv_flow_spec_eth eth;
	struct ibv_flow_spec_ipv4 ip;
	struct ibv_flow_spec_tcp_udp udp;
	union {
		struct ibv_flow_spec_action_tag tag;
		struct ibv_flow_spec_action_drop drop;
	};
};

/* UDP to this port, in VLAN `vlan` if that is not 0. */
static struct rule rule(unsigned port, unsigned vlan)
{
	struct rule rule = {
		.attr = { .type = IBV_FLOW_ATTR_NORMAL, .size = sizeof rule, .num_of_specs = 3, .port = 1 },
		.eth = { .type = IBV_FLOW_SPEC_ETH, .size = sizeof rule.eth },
		.ip = { .type = IBV_FLOW_SPEC_IPV4, .size = sizeof rule.ip },
		.udp = { .type = IBV_FLOW_SPEC_UDP, .size = sizeof rule.udp },
	};

	rule.eth.val.dst_mac[0] = 2;
	rule.eth.val.dst_mac[5] = 2;
	memset(rule.eth.mask.dst_mac, 0xff, 6);
	rule.eth.val.vlan_tag = htobe16(vlan);
	rule.eth.mask.vlan_tag = vlan ? htobe16(0xfff) : 0;
	rule.ip.val.dst_ip = htobe32(0x0a630002);
	rule.ip.mask.dst_ip = ~0u;
	rule.udp.val.dst_port = htobe16(port);
	rule.udp.mask.dst_port = 0xffff;
	return rule;
}

static struct ibv_flow *tagged(struct end *end, unsigned port, unsigned vlan, uint32_t tag)
{
	struct rule with = rule(port, vlan);

	with.attr.num_of_specs = 4;
	with.tag = (struct ibv_flow_spec_action_tag){ IBV_FLOW_SPEC_ACTION_TAG, sizeof with.tag, tag };
	return ibv_create_flow(end->qp, &with.attr);
}

/* What a flow gets is counted, as long as there is the flow. */
static void counted(struct end *a, struct end *b)
{
	struct ibv_counters_init_attr init = { 0 };
	struct ibv_counter_attach_attr packets = { .counter_desc = IBV_COUNTER_PACKETS, .index = 1 };
	struct ibv_counter_attach_attr bytes = { .counter_desc = IBV_COUNTER_BYTES };
	struct ibv_counters *counters = ibv_create_counters(b->context, &init);
	struct rule plain = rule(4005, 0);
	/* Specifications lie one behind the other, whatever their alignment. */
	union {
		struct ibv_flow_attr attr;
		struct __attribute__((packed)) {
			struct ibv_flow_attr attr;
			struct ibv_flow_spec_eth eth;
			struct ibv_flow_spec_ipv4 ip;
			struct ibv_flow_spec_tcp_udp udp;
			struct ibv_flow_spec_counter_action count;
		} all;
	} with = { .all = {
		plain.attr, plain.eth, plain.ip, plain.udp, { IBV_FLOW_SPEC_ACTION_COUNT, sizeof with.all.count, counters },
	} };
	struct ibv_flow *flow;
	uint64_t values[2];

	TRUE(counters);
	TRUE(ibv_attach_counters_point_flow(counters, &packets, NULL) == 0);
	TRUE(ibv_attach_counters_point_flow(counters, &bytes, NULL) == 0);
	with.attr.num_of_specs = 4;
	flow = ibv_create_flow(b->qp, &with.attr);
	TRUE(flow);
	TRUE(ibv_attach_counters_point_flow(counters, &bytes, NULL) == EBUSY);
	for (uint64_t sent = 1; sent <= 3; sent++) {
		send_frame(a, -1, 4005);
		arrived(b, -1, 4005, 0);
		TRUE(ibv_read_counters(counters, values, 2, 0) == 0);
		TRUE(values[0] == sent * FRAME && values[1] == sent);
	}
	TRUE(ibv_destroy_counters(counters) == EBUSY);
	TRUE(ibv_destroy_flow(flow) == 0 && ibv_read_counters(counters, values, 2, 0) == 0 && values[1] == 3);
	TRUE(ibv_destroy_counters(counters) == 0);
}

/* Without CAP_NET_RAW there are no frames. */
static void without_right(struct end *end)
{
	struct __user_cap_header_struct header = { _LINUX_CAPABILITY_VERSION_3, 0 };
	struct __user_cap_data_struct all[2], none[2];

	TRUE(syscall(SYS_capget, &header, all) == 0);
	memcpy(none, all, sizeof all);
	none[0].effective &= ~(1u << CAP_NET_RAW);
	TRUE(syscall(SYS_capset, &header, none) == 0);
	TRUE(!queue_pair(end) && errno == EPERM);
	TRUE(syscall(SYS_capset, &header, all) == 0);
}

static struct ibv_context *device(const char *mac)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	union ibv_gid gid;

	TRUE(list);
	for (; *list; list++) {
		struct ibv_context *context = ibv_open_device(*list);
		TRUE(context && ibv_query_gid(context, 1, 0, &gid) == 0);
		if (!memcmp(gid.raw + 12, mac, 4))
			return context;
		ibv_close_device(context);
	}
	return NULL;
}

/* A frame to this port comes to a receive in memory that is not registered: the queue ends, and an event says so. */
static void wq_fails(struct end *a, struct end *b, struct ibv_wq *wq, struct ibv_cq *cq, int vlan, unsigned port)
{
	struct ibv_wq_attr attr = { .attr_mask = IBV_WQ_ATTR_STATE, .wq_state = IBV_WQS_RESET };
	struct ibv_sge sge = { (uintptr_t)b->memory, ROOM, ~b->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 9, .sg_list = &sge, .num_sge = 1 }, *bad;
	struct ibv_async_event event;
	struct ibv_wc wc;

	TRUE(ibv_modify_wq(wq, &attr) == 0);
	attr.wq_state = IBV_WQS_RDY;
	TRUE(ibv_modify_wq(wq, &attr) == 0 && ibv_post_wq_recv(wq, &wr, &bad) == 0);
	send_frame(a, vlan, port);
	do {
		TRUE(ibv_get_async_event(b->context, &event) == 0);
		if (event.event_type != IBV_EVENT_WQ_FATAL)
			ibv_ack_async_event(&event);
	} while (event.event_type != IBV_EVENT_WQ_FATAL);
	TRUE(event.element.wq == wq);
	ibv_ack_async_event(&event);
	TRUE(ibv_poll_cq(cq, 1, &wc) == 1 && wc.wr_id == 9 && wc.status == IBV_WC_LOC_PROT_ERR);
	attr.attr_mask |= IBV_WQ_ATTR_CURR_STATE;
	attr.curr_wq_state = IBV_WQS_ERR;
	attr.wq_state = IBV_WQS_RESET;
	TRUE(ibv_modify_wq(wq, &attr) == 0);
}

/* Frames are spread over two queues by their UDP port: the same one always to the same queue, and each frame to one of them. */
static void spread(struct end *a, struct end *b)
{
	uint8_t key[40];
	struct ibv_wq *wqs[2];
	struct ibv_cq *cqs[2];
	struct ibv_wq_attr ready = { .attr_mask = IBV_WQ_ATTR_STATE, .wq_state = IBV_WQS_RDY };
	struct ibv_rwq_ind_table_init_attr table_attr = { .log_ind_tbl_size = 1, .ind_tbl = wqs };
	struct ibv_rwq_ind_table *table;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct ibv_qp *keep = b->qp;
	/* In a VLAN of its own: frames from before may still wait to be steered. */
	const int vlan = 0x777;
	struct rule all = rule(0, vlan);
	struct ibv_flow *flow;
	unsigned got[2] = { 0, 0 }, last[2], port_of[2];

	for (unsigned i = 0; i < sizeof key; i++)
		key[i] = 0x6d + 37 * i;
	for (int i = 0; i < 2; i++) {
		struct ibv_wq_init_attr init = { .wq_type = IBV_WQT_RQ, .max_wr = 64, .max_sge = 1, .pd = b->pd };
		struct ibv_sge sge = { (uintptr_t)b->memory, ROOM, b->mr->lkey };
		struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

		init.cq = cqs[i] = ibv_create_cq(b->context, 64, NULL, NULL, 0);
		wqs[i] = ibv_create_wq(b->context, &init);
		TRUE(wqs[i] && ibv_modify_wq(wqs[i], &ready) == 0);
		for (int n = 0; n < 64; n++)
			TRUE(ibv_post_wq_recv(wqs[i], &wr, &bad) == 0);
		TRUE(ibv_post_wq_recv(wqs[i], &wr, &bad) == ENOMEM);
	}
	table = ibv_create_rwq_ind_table(b->context, &table_attr);
	TRUE(table && ibv_destroy_wq(wqs[0]) == EBUSY);
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_RAW_PACKET, .pd = b->pd, .rwq_ind_tbl = table,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_IND_TABLE | IBV_QP_INIT_ATTR_RX_HASH,
		.rx_hash_conf = { IBV_RX_HASH_FUNC_TOEPLITZ, 39, key, IBV_RX_HASH_DST_PORT_UDP | IBV_RX_HASH_SRC_IPV4 },
	};
	TRUE(!ibv_create_qp_ex(b->context, &init) && errno == EINVAL);
	init.rx_hash_conf.rx_hash_key_len = sizeof key;
	init.rx_hash_conf.rx_hash_fields_mask |= IBV_RX_HASH_INNER;
	TRUE(!ibv_create_qp_ex(b->context, &init) && errno == EOPNOTSUPP);
	init.rx_hash_conf.rx_hash_fields_mask &= ~(uint64_t)IBV_RX_HASH_INNER;
	b->qp = ibv_create_qp_ex(b->context, &init);
	TRUE(b->qp && ibv_destroy_rwq_ind_table(table) == EBUSY);
	TRUE(ibv_modify_qp(b->qp, &attr, IBV_QP_STATE | IBV_QP_PORT) == EOPNOTSUPP);
	all.attr.num_of_specs = 2;
	flow = ibv_create_flow(b->qp, &all.attr);
	TRUE(flow);
	for (unsigned i = 0; i < 64; i++) {
		struct ibv_wc wc;
		time_t give_up = time(NULL) + 60;
		int queue = 0;

		/* Each port twice. */
		send_frame(a, vlan, 5000 + i / 2);
		while (ibv_poll_cq(cqs[queue], 1, &wc) == 0) {
			queue = !queue;
			TRUE(time(NULL) < give_up);
		}
		TRUE(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV && wc.byte_len == FRAME + 4);
		TRUE(wc.qp_num == wqs[queue]->wq_num);
		got[queue]++;
		port_of[queue] = 5000 + i / 2;
		last[i % 2] = queue;
		TRUE(i % 2 == 0 || last[0] == last[1]);
	}
	TRUE(got[0] + got[1] == 64 && got[0] > 0 && got[1] > 0);
	wq_fails(a, b, wqs[1], cqs[1], vlan, port_of[1]);
	TRUE(ibv_destroy_flow(flow) == 0 && ibv_destroy_qp(b->qp) == 0 && ibv_destroy_rwq_ind_table(table) == 0);
	TRUE(ibv_destroy_wq(wqs[0]) == 0 && ibv_destroy_wq(wqs[1]) == 0);
	TRUE(ibv_destroy_cq(cqs[0]) == 0 && ibv_destroy_cq(cqs[1]) == 0);
	b->qp = keep;
}

int main(void)
{
	static struct end a, b;
	struct ibv_flow *flow, *second, *third;
	struct rule wrong;
	struct ibv_device_attr attr;
	struct ibv_qp *first;

	TRUE(system("ip link add fa type veth peer name fb && ip addr add 10.77.1.1/24 dev fa && ip addr add 10.77.2.1/24 dev fb && "
		    "ip link set fa up && ip link set fb up") == 0);
	struct ibv_context *at_a = device("\x0a\x4d\x01\x01"), *at_b = device("\x0a\x4d\x02\x01");
	TRUE(at_a && at_b);
	TRUE(ibv_query_device(at_a, &attr) == 0 && attr.device_cap_flags & IBV_DEVICE_MANAGED_FLOW_STEERING && attr.max_raw_ethy_qp);
	a.context = at_a;
	a.pd = ibv_alloc_pd(at_a);
	a.cq = ibv_create_cq_ex(at_a, &(struct ibv_cq_init_attr_ex){ .cqe = 4 });
	without_right(&a);
	TRUE(ibv_destroy_cq(ibv_cq_ex_to_cq(a.cq)) == 0 && ibv_dealloc_pd(a.pd) == 0);
	open_end(&a, at_a);
	open_end(&b, at_b);

	/* What a queue pair of this kind does not send. */
	post(&a, FRAME, IBV_WR_SEND_WITH_IMM, EINVAL);
	post(&a, FRAME, IBV_WR_RDMA_WRITE, EINVAL);

	/* Out of one interface, in by the other; what no flow wants does not arrive. */
	flow = tagged(&b, 4000, 0, 11);
	TRUE(flow && flow->context == at_b);
	send_frame(&a, -1, 4001);
	send_frame(&a, -1, 4000);
	arrived(&b, -1, 4000, 11);
	woken_by_a_frame(&a, &b, 11);

	/* The tag of a VLAN is part of the frame, and of what rules see. */
	second = tagged(&b, 4002, 0x123, 12);
	TRUE(second);
	send_frame(&a, -1, 4002);
	send_frame(&a, 0x124, 4002);
	send_frame(&a, 0x6123, 4002);
	arrived(&b, 0x6123, 4002, 12);
	TRUE(ibv_destroy_flow(second) == 0);

	/* A rule that goes first drops. */
	wrong = rule(4000, 0);
	wrong.attr.num_of_specs = 4;
	wrong.drop = (struct ibv_flow_spec_action_drop){ IBV_FLOW_SPEC_ACTION_DROP, sizeof wrong.drop };
	TRUE(ibv_destroy_flow(flow) == 0);
	second = ibv_create_flow(b.qp, &wrong.attr);
	wrong = rule(4000, 0);
	wrong.attr.priority = 1;
	flow = ibv_create_flow(b.qp, &wrong.attr);
	third = tagged(&b, 4003, 0, 13);
	TRUE(flow && second && third);
	send_frame(&a, -1, 4000);
	send_frame(&a, -1, 4003);
	arrived(&b, -1, 4003, 13);
	TRUE(ibv_destroy_flow(second) == 0 && ibv_destroy_flow(third) == 0);
	send_frame(&a, -1, 4000);
	arrived(&b, -1, 4000, 0);

	/* A queue pair lives as long as its flows. */
	TRUE(ibv_destroy_qp(b.qp) == EBUSY);

	/* Between two queue pairs of a device: what one sends is for the other's flow, and goes out as well. */
	first = a.qp;
	a.qp = queue_pair(&a);
	TRUE(a.qp);
	ready(&a);
	second = tagged(&a, 4000, 0, 14);
	TRUE(second);
	{
		struct ibv_sge sge = { (uintptr_t)a.memory, length(a.memory, -1, 4000), a.mr->lkey };
		struct ibv_send_wr wr = { .wr_id = 78, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
		int sends = 0, receives = 0;

		TRUE(ibv_post_send(first, &wr, &bad) == 0);
		for (int i = 0; i < 2; i++) {
			uint64_t wr_id;
			enum ibv_wc_opcode opcode;
			uint32_t len, tag;

			await(&a, &wr_id, &opcode, &len, &tag);
			sends += opcode == IBV_WC_SEND && wr_id == 78;
			receives += opcode == IBV_WC_RECV && len == FRAME && tag == 14;
		}
		TRUE(sends == 1 && receives == 1);
	}
	arrived(&b, -1, 4000, 0);

	/* A frame above the MTU ends in an error, and the send queue with it. */
	{
		struct ibv_poll_cq_attr poll = { 0 };
		struct ibv_qp_attr state;
		struct ibv_qp_init_attr init;
		time_t give_up = time(NULL) + 60;

		post(&a, 1600, IBV_WR_SEND, 0);
		while (ibv_start_poll(a.cq, &poll) != 0)
			TRUE(time(NULL) < give_up);
		TRUE(a.cq->status == IBV_WC_LOC_LEN_ERR);
		ibv_end_poll(a.cq);
		TRUE(ibv_query_qp(a.qp, &state, IBV_QP_STATE, &init) == 0);
		TRUE(state.qp_state == IBV_QPS_SQE && init.qp_type == IBV_QPT_RAW_PACKET);
		state.qp_state = IBV_QPS_RTS;
		TRUE(ibv_modify_qp(a.qp, &state, IBV_QP_STATE) == 0);
		send_frame(&a, -1, 4001);
	}

	counted(&a, &b);
	spread(&a, &b);

	/* Rules that cannot be. */
	wrong = rule(4000, 0);
	wrong.attr.port = 2;
	TRUE(!ibv_create_flow(b.qp, &wrong.attr) && errno == EINVAL);
	wrong = rule(4000, 0);
	wrong.udp.size = 4;
	TRUE(!ibv_create_flow(b.qp, &wrong.attr) && errno == EINVAL);
	wrong = rule(4000, 0);
	wrong.udp.type |= IBV_FLOW_SPEC_INNER;
	TRUE(!ibv_create_flow(b.qp, &wrong.attr) && errno == EOPNOTSUPP);
	wrong = rule(4000, 0);
	wrong.attr.flags = IBV_FLOW_ATTR_FLAGS_EGRESS;
	TRUE(!ibv_create_flow(b.qp, &wrong.attr) && errno == EOPNOTSUPP);
	wrong = rule(4000, 0);
	wrong.attr.type = IBV_FLOW_ATTR_SNIFFER;
	TRUE(!ibv_create_flow(b.qp, &wrong.attr) && errno == EINVAL);

	TRUE(ibv_destroy_flow(second) == 0 && ibv_destroy_flow(flow) == 0);
	TRUE(ibv_destroy_qp(first) == 0 && ibv_destroy_qp(a.qp) == 0 && ibv_destroy_qp(b.qp) == 0);
	printf("good\n");
	return 0;
}
