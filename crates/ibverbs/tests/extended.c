/*
 * Two connected queue pairs of one process through what only the C library has: batches of ibv_wr_*, extended polling, lists of
 * requests with one bad in the middle, events that hold up destruction until they are acknowledged.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MUST(condition) do { if (!(condition)) { printf("line %d: %s (errno %d)\n", __LINE__, #condition, errno); exit(1); } } while (0)

enum { DEPTH = 4, SIZE = 4096, GIVE_UP_MS = 60000 };

/* What rdma-core's headers have since version 45. */
enum {
	ACCESS_FLUSH_GLOBAL = 1 << 8, ACCESS_FLUSH_PERSISTENT = 1 << 9, WITH_FLUSH = 1 << 11, WITH_ATOMIC_WRITE = 1 << 12,
	WC_FLUSH = 8, WC_ATOMIC_WRITE = 9, TO_GLOBAL = 1, OF_RANGE = 0, OF_MR = 1,
	/* Of wr_flush, the last member of struct ibv_qp_ex. */
	WR_FLUSH = 352,
};

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static struct ibv_cq_ex *send_cq;
static struct ibv_cq *recv_cq;
static struct ibv_qp *qp[2];
static struct ibv_qp_ex *ex;
static struct ibv_mr *mr;
static char memory[2 * SIZE];

static void to(struct ibv_qp *of, enum ibv_qp_state state, uint32_t peer)
{
	struct ibv_qp_attr attr = {
		.qp_state = state, .port_num = 1, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer, .max_dest_rd_atomic = 1,
		.min_rnr_timer = 12, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC |
				   ACCESS_FLUSH_GLOBAL,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 1 } },
	};
	int mask = IBV_QP_STATE;

	MUST(!ibv_query_gid(context, 1, 0, &attr.ah_attr.grh.dgid));
	if (state == IBV_QPS_INIT)
		mask |= IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
	if (state == IBV_QPS_RTR)
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			IBV_QP_MIN_RNR_TIMER;
	if (state == IBV_QPS_RTS)
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
	MUST(!ibv_modify_qp(of, &attr, mask));
	MUST(of->state == state);
}

static void set_up(struct ibv_srq *srq)
{
	struct ibv_cq_init_attr_ex cq_attr = { .cqe = 64, .wc_flags = IBV_WC_STANDARD_FLAGS };
	struct ibv_qp_init_attr_ex attr = {
		.qp_type = IBV_QPT_RC, .pd = pd, .srq = srq,
		.cap = { DEPTH, DEPTH, 2, 2, 64 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE |
				  IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
				  IBV_QP_EX_WITH_SEND_WITH_INV | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD |
				  WITH_FLUSH | WITH_ATOMIC_WRITE,
	};

	channel = ibv_create_comp_channel(context);
	MUST(channel);
	send_cq = ibv_create_cq_ex(context, &cq_attr);
	recv_cq = ibv_create_cq(context, 64, &memory, channel, 0);
	MUST(send_cq && recv_cq);
	attr.send_cq = ibv_cq_ex_to_cq(send_cq);
	attr.recv_cq = recv_cq;
	for (int at = 0; at < 2; at++) {
		qp[at] = ibv_create_qp_ex(context, &attr);
		MUST(qp[at]);
		to(qp[at], IBV_QPS_INIT, 0);
	}
	for (int at = 0; at < 2; at++) {
		to(qp[at], IBV_QPS_RTR, qp[!at]->qp_num);
		to(qp[at], IBV_QPS_RTS, 0);
	}
	ex = ibv_qp_to_qp_ex(qp[0]);
	MUST(ex);
}

static void tear_down(void)
{
	MUST(!ibv_destroy_qp(qp[0]) && !ibv_destroy_qp(qp[1]));
	MUST(!ibv_destroy_cq(ibv_cq_ex_to_cq(send_cq)) && !ibv_destroy_cq(recv_cq));
	MUST(!ibv_destroy_comp_channel(channel));
}

static void begin(uint64_t id, unsigned int flags)
{
	ex->wr_id = id;
	ex->wr_flags = flags;
}

/* Waits for one completion of a send; leaves the CQ between start_poll and end_poll. */
static void start(uint64_t id, enum ibv_wc_status status)
{
	struct ibv_poll_cq_attr attr = { 0 };
	int result;

	do
		result = ibv_start_poll(send_cq, &attr);
	while (result == ENOENT);
	MUST(result == 0);
	if (send_cq->wr_id != id || send_cq->status != status)
		printf("completion %lu with %s\n", (unsigned long)send_cq->wr_id, ibv_wc_status_str(send_cq->status));
	MUST(send_cq->wr_id == id && send_cq->status == status);
}

static void sent(uint64_t id, unsigned int opcode)
{
	start(id, IBV_WC_SUCCESS);
	MUST(ibv_wc_read_opcode(send_cq) == opcode);
	MUST(ibv_wc_read_qp_num(send_cq) == qp[0]->qp_num);
	ibv_end_poll(send_cq);
}

static void receive(uint64_t id)
{
	struct ibv_sge sge = { (uintptr_t)memory + SIZE, SIZE, mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;

	MUST(!ibv_post_recv(qp[1], &wr, &bad));
}

static struct ibv_wc received(uint64_t id)
{
	struct ibv_wc wc;
	int count;

	do
		count = ibv_poll_cq(recv_cq, 1, &wc);
	while (count == 0);
	MUST(count == 1 && wc.wr_id == id && wc.status == IBV_WC_SUCCESS);
	return wc;
}

/* Each builder and setter once. */
static void batches(void)
{
	struct ibv_data_buf pieces[2] = { { "ab", 2 }, { "cde", 3 } };
	struct ibv_sge list[2] = { { (uintptr_t)memory, 8, mr->lkey }, { (uintptr_t)memory + 8, 8, mr->lkey } };
	char *there = memory + SIZE;
	uint64_t *word = (uint64_t *)there;
	struct ibv_wc wc;

	strcpy(memory, "0123456789abcdef");
	receive(1);
	receive(2);
	receive(3);
	ibv_wr_start(ex);
	begin(11, IBV_SEND_SIGNALED);
	ibv_wr_send(ex);
	ibv_wr_set_sge_list(ex, 2, list);
	begin(12, 0);
	ibv_wr_send_imm(ex, htonl(0x01020304));
	ibv_wr_set_inline_data_list(ex, 2, pieces);
	begin(13, IBV_SEND_SIGNALED);
	ibv_wr_rdma_write_imm(ex, mr->rkey, (uintptr_t)there + 64, htonl(5));
	ibv_wr_set_inline_data(ex, "xyz", 3);
	MUST(!ibv_wr_complete(ex));
	wc = received(1);
	MUST(wc.byte_len == 16 && !(wc.wc_flags & IBV_WC_WITH_IMM) && wc.qp_num == qp[1]->qp_num);
	wc = received(2);
	MUST(wc.byte_len == 5 && wc.wc_flags & IBV_WC_WITH_IMM && ntohl(wc.imm_data) == 0x01020304);
	wc = received(3);
	MUST(wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM && ntohl(wc.imm_data) == 5);
	MUST(!memcmp(there, "abcde567", 8) && !memcmp(there + 64, "xyz", 3));
	/* Two completions in one polling. */
	start(11, IBV_WC_SUCCESS);
	while (ibv_next_poll(send_cq) == ENOENT)
		;
	MUST(send_cq->wr_id == 13 && ibv_wc_read_opcode(send_cq) == IBV_WC_RDMA_WRITE);
	ibv_end_poll(send_cq);

	*word = 40;
	ibv_wr_start(ex);
	begin(14, IBV_SEND_SIGNALED);
	ibv_wr_atomic_fetch_add(ex, mr->rkey, (uintptr_t)word, 2);
	ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, 8);
	begin(15, IBV_SEND_SIGNALED);
	ibv_wr_atomic_cmp_swp(ex, mr->rkey, (uintptr_t)word, 42, 7);
	ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory + 8, 8);
	begin(16, IBV_SEND_SIGNALED);
	ibv_wr_rdma_read(ex, mr->rkey, (uintptr_t)word);
	ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory + 16, 8);
	MUST(!ibv_wr_complete(ex));
	sent(14, IBV_WC_FETCH_ADD);
	sent(15, IBV_WC_COMP_SWAP);
	sent(16, IBV_WC_RDMA_READ);
	MUST(((uint64_t *)memory)[0] == 40 && ((uint64_t *)memory)[1] == 42 && ((uint64_t *)memory)[2] == 7);
}

static uint64_t card_clock(void)
{
	struct ibv_values_ex values = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };

	MUST(!ibv_query_rt_values_ex(context, &values));
	MUST(values.comp_mask == IBV_VALUES_MASK_RAW_CLOCK && values.raw_clock.tv_sec == 0);
	return values.raw_clock.tv_nsec;
}

static uint64_t wall_clock(void)
{
	struct timespec now;

	MUST(!clock_gettime(CLOCK_REALTIME, &now));
	return now.tv_sec * 1000000000ull + now.tv_nsec;
}

/* The time of a completion lies between those before the request and after the completion was seen, by both clocks. */
static void timestamps(void)
{
	struct ibv_cq_init_attr_ex attr = {
		.cqe = 4, .wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP |
				      IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK,
	};
	struct ibv_cq_ex *plain = send_cq, *stamped = ibv_create_cq_ex(context, &attr);
	struct ibv_qp_init_attr init = {
		.send_cq = ibv_cq_ex_to_cq(stamped), .recv_cq = ibv_cq_ex_to_cq(stamped), .qp_type = IBV_QPT_RC,
		.cap = { DEPTH, DEPTH, 1, 1, 0 },
	};
	struct ibv_values_ex nothing = { .comp_mask = 0 };
	struct ibv_device_attr_ex device;
	uint64_t card, wall, stamp, read;
	struct ibv_recv_wr wr = { .wr_id = 7 }, *bad;
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	struct ibv_qp *flushed;

	MUST(!ibv_query_device_ex(context, NULL, &device));
	MUST(device.hca_core_clock == 1000000 && device.completion_timestamp_mask == UINT64_MAX);
	MUST(ibv_query_rt_values_ex(context, &nothing) == EINVAL);
	MUST(stamped);
	flushed = ibv_create_qp(pd, &init);
	MUST(flushed);
	to(flushed, IBV_QPS_INIT, 0);
	card = card_clock();
	wall = wall_clock();
	MUST(!ibv_post_recv(flushed, &wr, &bad));
	MUST(!ibv_modify_qp(flushed, &error, IBV_QP_STATE));
	send_cq = stamped;
	start(7, IBV_WC_WR_FLUSH_ERR);
	stamp = ibv_wc_read_completion_ts(stamped);
	read = ibv_wc_read_completion_wallclock_ns(stamped);
	MUST(stamp >= card && stamp <= card_clock());
	MUST(read >= wall && read <= wall_clock());
	ibv_end_poll(stamped);
	send_cq = plain;
	MUST(!ibv_destroy_qp(flushed) && !ibv_destroy_cq(ibv_cq_ex_to_cq(stamped)));
}

/* A batch that does not fit is not posted at all; nor is one that was aborted. */
static void all_or_nothing(void)
{
	ibv_wr_start(ex);
	for (int at = 0; at < DEPTH + 1; at++) {
		begin(100 + at, IBV_SEND_SIGNALED);
		ibv_wr_rdma_write(ex, mr->rkey, (uintptr_t)memory + SIZE);
		ibv_wr_set_inline_data(ex, "no!", 3);
	}
	MUST(ibv_wr_complete(ex) == ENOMEM);
	ibv_wr_start(ex);
	begin(100, IBV_SEND_SIGNALED);
	ibv_wr_rdma_write(ex, mr->rkey, (uintptr_t)memory + SIZE);
	ibv_wr_set_inline_data(ex, "no!", 3);
	ibv_wr_abort(ex);
	memcpy(memory + SIZE, "old", 3);
	ibv_wr_start(ex);
	for (int at = 0; at < DEPTH; at++) {
		begin(200 + at, IBV_SEND_SIGNALED);
		ibv_wr_rdma_write(ex, mr->rkey, (uintptr_t)memory + SIZE + 8);
		ibv_wr_set_inline_data(ex, "yes", 3);
	}
	MUST(!ibv_wr_complete(ex));
	for (int at = 0; at < DEPTH; at++)
		sent(200 + at, IBV_WC_RDMA_WRITE);
	MUST(!memcmp(memory + SIZE, "old", 3) && !memcmp(memory + SIZE + 8, "yes", 3));
}

/* Of a list, what stands before the bad request is posted, and nothing after it. */
static void lists(void)
{
	struct ibv_sge sge = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_send_wr wr[3], *bad = NULL;

	for (int at = 0; at < 3; at++)
		wr[at] = (struct ibv_send_wr){
			.wr_id = 300 + at, .next = at < 2 ? &wr[at + 1] : NULL, .sg_list = &sge, .num_sge = 1,
			.opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
			.wr.rdma = { (uintptr_t)memory + SIZE, mr->rkey },
		};
	wr[1].num_sge = 99;
	MUST(ibv_post_send(qp[0], wr, &bad) == EINVAL && bad == &wr[1]);
	sent(300, IBV_WC_RDMA_WRITE);
	MUST(ibv_start_poll(send_cq, &(struct ibv_poll_cq_attr){ 0 }) == ENOENT);
}

static void write_remote(uint64_t id, uint32_t rkey, const void *there, enum ibv_wc_status status)
{
	ibv_wr_start(ex);
	begin(id, IBV_SEND_SIGNALED);
	ibv_wr_rdma_write(ex, rkey, (uintptr_t)there);
	ibv_wr_set_inline_data(ex, "new", 3);
	MUST(!ibv_wr_complete(ex));
	start(id, status);
	ibv_end_poll(send_cq);
}

/* Zeros come out of a null region, and what goes into it is gone; whatever its addresses. */
static void null_region(void)
{
	struct ibv_mr *null = ibv_alloc_null_mr(pd);
	char *there = memory + SIZE;

	MUST(null);
	struct ibv_sge from[2] = { { 0x1234, 8, null->lkey }, { (uintptr_t)memory, 8, mr->lkey } };
	struct ibv_sge into[2] = { { (uintptr_t)there, 12, mr->lkey }, { 0, 4, null->lkey } };
	struct ibv_recv_wr wr = { .wr_id = 61, .sg_list = into, .num_sge = 2 }, *bad;
	memcpy(memory, "abcdefgh", 8);
	memset(there, 1, 16);
	MUST(!ibv_post_recv(qp[1], &wr, &bad));
	ibv_wr_start(ex);
	begin(62, IBV_SEND_SIGNALED);
	ibv_wr_send(ex);
	ibv_wr_set_sge_list(ex, 2, from);
	begin(63, IBV_SEND_SIGNALED);
	ibv_wr_rdma_read(ex, mr->rkey, (uintptr_t)memory);
	ibv_wr_set_sge(ex, null->lkey, UINT64_MAX - 7, 8);
	MUST(!ibv_wr_complete(ex));
	MUST(received(61).byte_len == 16);
	sent(62, IBV_WC_SEND);
	sent(63, IBV_WC_RDMA_READ);
	MUST(!memcmp(there, "\0\0\0\0\0\0\0\0abcd\1\1\1\1", 16));
	MUST(!ibv_dereg_mr(null));
}

/* Younger than the distribution's headers. */
struct mr_init_attr {
	size_t length;
	int access;
	uint64_t comp_mask, iova;
	void *addr;
	int fd;
	uint64_t fd_offset;
	void *dmah, *buf;
};
struct ibv_mr *ibv_reg_mr_ex(struct ibv_pd *pd, struct mr_init_attr *attr);
int ibv_dm_export_dmabuf_fd(struct ibv_dm *dm);

/* Regions of files: what a peer writes is in the file. */
static void files(void)
{
	enum { PAGE = 4096, BOTH = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, IOVA = 0x70000, AT = 100 };
	struct mr_init_attr attr = { .length = PAGE, .access = BOTH, .comp_mask = 1 << 0 | 1 << 2, .iova = IOVA };
	struct ibv_alloc_dm_attr dm_attr = { .length = 64 };
	int fd = memfd_create("region", 0), readable;
	struct ibv_mr *file;
	struct ibv_dm *dm;
	char *map, path[64];

	MUST(fd >= 0 && !ftruncate(fd, 3 * PAGE));
	map = mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	MUST(map != MAP_FAILED);
	MUST(!ibv_reg_dmabuf_mr(pd, AT, PAGE, IOVA, fd, BOTH) && errno == EINVAL);
	MUST(!ibv_reg_dmabuf_mr(pd, PAGE, 2 * PAGE + 1, IOVA, fd, BOTH) && errno == EINVAL);
	MUST(!ibv_reg_dmabuf_mr(pd, PAGE, 0, IOVA, fd, BOTH) && errno == EINVAL);
	MUST(!ibv_reg_dmabuf_mr(pd, UINT64_MAX - PAGE + 1, PAGE, IOVA, fd, BOTH) && errno == EINVAL);
	MUST(!ibv_reg_dmabuf_mr(pd, 0, PAGE, IOVA, fd, BOTH | IBV_ACCESS_ON_DEMAND) && errno == EINVAL);
	MUST(!ibv_reg_dmabuf_mr(pd, 0, PAGE, IOVA, fd, IBV_ACCESS_REMOTE_WRITE) && errno == EINVAL);
	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	readable = open(path, O_RDONLY);
	MUST(readable >= 0 && !ibv_reg_dmabuf_mr(pd, 0, PAGE, IOVA, readable, BOTH) && errno == EACCES);
	file = ibv_reg_dmabuf_mr(pd, 0, PAGE, IOVA, readable, IBV_ACCESS_REMOTE_READ);
	MUST(file && !ibv_dereg_mr(file) && !close(readable));

	file = ibv_reg_dmabuf_mr(pd, PAGE + AT, PAGE, IOVA + AT, fd, BOTH);
	MUST(file && file->addr == (void *)(PAGE + AT) && file->length == PAGE && file->pd == pd);
	write_remote(450, file->rkey, (void *)(IOVA + AT), IBV_WC_SUCCESS);
	write_remote(451, file->rkey, (void *)(IOVA + AT + PAGE - 3), IBV_WC_SUCCESS);
	MUST(!memcmp(map + PAGE + AT, "new", 4) && !memcmp(map + 2 * PAGE + AT - 4, "\0new", 5));
	MUST(ibv_rereg_mr(file, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, map, PAGE, 0) == IBV_REREG_MR_ERR_INPUT);
	MUST(!ibv_dereg_mr(file));

	MUST(!ibv_reg_mr_ex(pd, &attr) && errno == EINVAL);
	attr.comp_mask |= 1 << 3;
	attr.fd = fd;
	file = ibv_reg_mr_ex(pd, &attr);
	/* The mapping is the library's own. */
	MUST(file && !close(fd));
	write_remote(452, file->rkey, (void *)IOVA, IBV_WC_SUCCESS);
	MUST(!memcmp(map, "new", 4));
	MUST(!ibv_dereg_mr(file) && !munmap(map, 3 * PAGE));

	dm = ibv_alloc_dm(context, &dm_attr);
	MUST(dm);
	fd = ibv_dm_export_dmabuf_fd(dm);
	MUST(fd >= 0 && ftruncate(fd, 0) == -1);
	map = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	MUST(map != MAP_FAILED && !ibv_memcpy_to_dm(dm, 4, "dm memory..", 12));
	MUST(!memcmp(map, "\0\0\0\0dm memory..", 16));
	file = ibv_reg_dmabuf_mr(pd, 0, PAGE, 0, fd, BOTH);
	MUST(file && !close(fd) && !ibv_free_dm(dm));
	write_remote(453, file->rkey, (void *)4, IBV_WC_SUCCESS);
	MUST(!memcmp(map + 4, "newmemory", 9));
	MUST(!ibv_dereg_mr(file) && !munmap(map, PAGE));
}

/* The rate that a queue pair keeps to, in kbit/s. */
static uint32_t rate_of(struct ibv_qp *pair)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	MUST(!ibv_query_qp(pair, &attr, IBV_QP_RATE_LIMIT, &init));
	return attr.rate_limit;
}

/* A queue pair that keeps to a rate still sends. */
static void paced(void)
{
	struct ibv_device_attr_ex attr;
	struct ibv_qp_rate_limit_attr limit = { 0 };

	MUST(!ibv_query_device_ex(context, NULL, &attr));
	MUST(attr.packet_pacing_caps.supported_qpts == (1 << IBV_QPT_RC | 1 << IBV_QPT_UC | 1 << IBV_QPT_UD));
	limit.rate_limit = attr.packet_pacing_caps.qp_rate_limit_min - 1;
	MUST(ibv_modify_qp_rate_limit(qp[0], &limit) == EINVAL);
	limit.rate_limit = attr.packet_pacing_caps.qp_rate_limit_max + 1;
	MUST(ibv_modify_qp_rate_limit(qp[0], &limit) == EINVAL);
	limit.rate_limit = attr.packet_pacing_caps.qp_rate_limit_min;
	limit.max_burst_sz = 1;
	MUST(ibv_modify_qp_rate_limit(qp[0], &limit) == EINVAL);
	limit.max_burst_sz = 0;
	MUST(!ibv_modify_qp_rate_limit(qp[0], &limit));
	for (uint64_t id = 500; id < 504; id++)
		write_remote(id, mr->rkey, memory + SIZE, IBV_WC_SUCCESS);
	MUST(rate_of(qp[0]) == attr.packet_pacing_caps.qp_rate_limit_min);
	limit.rate_limit = 0;
	MUST(!ibv_modify_qp_rate_limit(qp[0], &limit));

	/* ibv_modify_qp does it, too. */
	struct ibv_qp_attr change = { .rate_limit = attr.packet_pacing_caps.qp_rate_limit_max + 1 };
	MUST(ibv_modify_qp(qp[0], &change, IBV_QP_RATE_LIMIT) == EINVAL && rate_of(qp[0]) == 0);
	change.rate_limit = attr.packet_pacing_caps.qp_rate_limit_max;
	MUST(!ibv_modify_qp(qp[0], &change, IBV_QP_RATE_LIMIT) && rate_of(qp[0]) == change.rate_limit);
	write_remote(504, mr->rkey, memory + SIZE, IBV_WC_SUCCESS);
	change.rate_limit = 0;
	MUST(!ibv_modify_qp(qp[0], &change, IBV_QP_RATE_LIMIT) && rate_of(qp[0]) == 0);
}

/* A region that is changed keeps its keys, and what was not changed; a refusal changes nothing. Ends with queue pairs in error. */
static void changed_regions(void)
{
	enum { BOTH = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE };
	static char before[64], after[128];
	struct ibv_pd *other = ibv_alloc_pd(context);
	struct ibv_mr *region = ibv_reg_mr(pd, before, sizeof before, BOTH);
	MUST(other && region);
	uint32_t key = region->rkey;

	MUST(ibv_rereg_mr(region, 0, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT && errno == EINVAL);
	MUST(ibv_rereg_mr(region, 8, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT && errno == EINVAL);
	MUST(ibv_rereg_mr(region, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, after, 0, 0) == IBV_REREG_MR_ERR_INPUT);
	MUST(ibv_rereg_mr(region, IBV_REREG_MR_CHANGE_PD, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT);
	MUST(ibv_rereg_mr(region, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_REMOTE_WRITE) == IBV_REREG_MR_ERR_INPUT);
	write_remote(400, key, before, IBV_WC_SUCCESS);
	MUST(!memcmp(before, "new", 4));

	MUST(!ibv_rereg_mr(region, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, after, sizeof after, 0));
	MUST(region->addr == after && region->length == sizeof after && region->rkey == key && region->lkey == key);
	write_remote(401, key, after + 100, IBV_WC_SUCCESS);
	MUST(!memcmp(after + 100, "new", 4));

	MUST(!ibv_rereg_mr(region, IBV_REREG_MR_CHANGE_PD, other, NULL, 0, 0) && region->pd == other);
	MUST(ibv_dealloc_pd(other) == EBUSY);
	MUST(!ibv_rereg_mr(region, IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_TRANSLATION, pd, before, sizeof before, 0));
	MUST(!ibv_dealloc_pd(other));
	write_remote(402, key, before + 8, IBV_WC_SUCCESS);
	MUST(!ibv_rereg_mr(region, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE));
	write_remote(403, key, before, IBV_WC_REM_ACCESS_ERR);
	MUST(!ibv_dereg_mr(region));
}

/* Windows of both types: bound, used, taken back at this end and by the peer, and gone. */
static void windows(void)
{
	enum { BOTH = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE };
	static char part[256];
	struct ibv_mr *region = ibv_reg_mr(pd, part, sizeof part, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
	struct ibv_mw *one = ibv_alloc_mw(pd, IBV_MW_TYPE_1), *two = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	struct ibv_mw_bind_info info = { region, (uintptr_t)part + 64, 64, BOTH };
	struct ibv_mw_bind bind = { 500, IBV_SEND_SIGNALED, info };
	struct ibv_send_wr wr = { .wr_id = 501, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_pd *other = ibv_alloc_pd(context);
	struct ibv_wc wc;
	int count;

	MUST(region && one && two && other);
	MUST(!ibv_alloc_mw(pd, 3) && errno == EINVAL);
	struct ibv_mw *stranger = ibv_alloc_mw(other, IBV_MW_TYPE_2);
	MUST(stranger && ibv_dealloc_pd(other) == EBUSY);

	/* Type 1, bound by the queue pair that is written through the other. */
	uint32_t before = one->rkey;
	MUST(ibv_bind_mw(qp[1], two, &bind) == EINVAL);
	MUST(!ibv_bind_mw(qp[0], one, &bind) && one->rkey != before);
	start(500, IBV_WC_SUCCESS);
	MUST(ibv_wc_read_opcode(send_cq) == IBV_WC_BIND_MW);
	ibv_end_poll(send_cq);
	write_remote(502, one->rkey, part + 64, IBV_WC_SUCCESS);
	write_remote(503, one->rkey, part + 125, IBV_WC_SUCCESS);
	MUST(!memcmp(part + 64, "new", 4) && !memcmp(part + 125, "new", 4));
	MUST(ibv_dereg_mr(region) == EBUSY);
	MUST(ibv_rereg_mr(region, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0) && errno == EBUSY);

	/* Type 2: for the queue pair that bound it only, which is the one at the other end. */
	wr.bind_mw.mw = stranger;
	wr.bind_mw.rkey = ibv_inc_rkey(stranger->rkey);
	wr.bind_mw.bind_info = info;
	MUST(ibv_post_send(qp[1], &wr, &bad) == EPERM && bad == &wr);
	wr.bind_mw.mw = two;
	MUST(ibv_post_send(qp[1], &wr, &bad) == EINVAL);
	wr.bind_mw.rkey = ibv_inc_rkey(two->rkey);
	MUST(!ibv_post_send(qp[1], &wr, &bad));
	start(501, IBV_WC_SUCCESS);
	ibv_end_poll(send_cq);
	write_remote(504, wr.bind_mw.rkey, part + 70, IBV_WC_SUCCESS);

	/* The peer takes it back with its message. */
	receive(6);
	ibv_wr_start(ex);
	begin(505, IBV_SEND_SIGNALED);
	ibv_wr_send_inv(ex, wr.bind_mw.rkey);
	MUST(!ibv_wr_complete(ex));
	do
		count = ibv_poll_cq(recv_cq, 1, &wc);
	while (count == 0);
	MUST(wc.status == IBV_WC_SUCCESS && wc.wc_flags & IBV_WC_WITH_INV && wc.invalidated_rkey == wr.bind_mw.rkey);
	sent(505, IBV_WC_SEND);

	/* Bound anew, and taken back here. */
	wr.bind_mw.rkey = ibv_inc_rkey(wr.bind_mw.rkey);
	MUST(!ibv_post_send(qp[1], &wr, &bad));
	start(501, IBV_WC_SUCCESS);
	ibv_end_poll(send_cq);
	struct ibv_send_wr back = {
		.wr_id = 506, .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = wr.bind_mw.rkey,
	};
	MUST(!ibv_post_send(qp[1], &back, &bad));
	start(506, IBV_WC_SUCCESS);
	MUST(ibv_wc_read_opcode(send_cq) == IBV_WC_LOCAL_INV);
	ibv_end_poll(send_cq);

	/* Out of bounds of the window, though inside the region. */
	write_remote(507, one->rkey, part + 126, IBV_WC_REM_ACCESS_ERR);
	MUST(part[126] == 'e');
	MUST(!ibv_dealloc_mw(one) && !ibv_dealloc_mw(two) && !ibv_dealloc_mw(stranger));
	MUST(!ibv_dereg_mr(region) && !ibv_dealloc_pd(other));
}

static atomic_int destroyed;

static void *destroy_cq(void *cq)
{
	MUST(!ibv_destroy_cq(cq));
	destroyed = 1;
	return NULL;
}

static void *destroy_srq(void *srq)
{
	MUST(!ibv_destroy_srq(srq));
	destroyed = 1;
	return NULL;
}

/* The thread ends only after the acknowledgement, and then it does. */
static void destruction_waits(void *(*destroy)(void *), void *object, void (*acknowledge)(void *), void *argument)
{
	pthread_t thread;

	destroyed = 0;
	MUST(!pthread_create(&thread, NULL, destroy, object));
	for (int turn = 0; turn < 50; turn++) {
		MUST(!destroyed);
		poll(NULL, 0, 1);
	}
	acknowledge(argument);
	MUST(!pthread_join(thread, NULL));
	MUST(destroyed);
}

static void acknowledge_cq(void *cq)
{
	ibv_ack_cq_events(cq, 1);
}

static void acknowledge_async(void *event)
{
	ibv_ack_async_event(event);
}

static void completion_events(void)
{
	struct pollfd fd = { .fd = channel->fd, .events = POLLIN };
	struct ibv_cq *cq = NULL;
	void *cookie = NULL;

	MUST(poll(&fd, 1, 0) == 0);
	MUST(!ibv_req_notify_cq(recv_cq, 0));
	receive(4);
	ibv_wr_start(ex);
	begin(17, IBV_SEND_SIGNALED);
	ibv_wr_send(ex);
	ibv_wr_set_inline_data(ex, "e", 1);
	MUST(!ibv_wr_complete(ex));
	MUST(poll(&fd, 1, GIVE_UP_MS) == 1);
	MUST(!ibv_get_cq_event(channel, &cq, &cookie) && cq == recv_cq && cookie == &memory);
	received(4);
	sent(17, IBV_WC_SEND);
	/* One event for one request. */
	MUST(poll(&fd, 1, 0) == 0);
	MUST(!ibv_destroy_qp(qp[0]) && !ibv_destroy_qp(qp[1]));
	destruction_waits(destroy_cq, recv_cq, acknowledge_cq, recv_cq);
	MUST(!ibv_destroy_cq(ibv_cq_ex_to_cq(send_cq)));
	MUST(!ibv_destroy_comp_channel(channel));
}

/* As ibv_wr_flush of later headers: through the pointer behind all others. */
static void wr_flush(size_t length, uint8_t type, uint8_t level)
{
	void (*call)(struct ibv_qp_ex *, uint32_t, uint64_t, size_t, uint8_t, uint8_t);

	memcpy(&call, (char *)ex + WR_FLUSH, sizeof call);
	call(ex, mr->rkey, (uintptr_t)memory + SIZE, length, type, level);
}

/* FLUSH of a range and of all, and ATOMIC WRITE between. */
static void placed(void)
{
	ibv_wr_start(ex);
	begin(91, IBV_SEND_SIGNALED);
	ibv_wr_rdma_write(ex, mr->rkey, (uintptr_t)memory + SIZE);
	ibv_wr_set_inline_data(ex, "placed", 7);
	begin(92, IBV_SEND_SIGNALED);
	wr_flush(7, TO_GLOBAL, OF_RANGE);
	begin(93, IBV_SEND_SIGNALED);
	ibv_wr_atomic_write(ex, mr->rkey, (uintptr_t)memory + SIZE + 8, "8 bytes");
	begin(94, IBV_SEND_SIGNALED);
	wr_flush(0, TO_GLOBAL, OF_MR);
	MUST(!ibv_wr_complete(ex));
	sent(91, IBV_WC_RDMA_WRITE);
	sent(92, WC_FLUSH);
	sent(93, WC_ATOMIC_WRITE);
	sent(94, WC_FLUSH);
	MUST(!strcmp(memory + SIZE, "placed") && !strcmp(memory + SIZE + 8, "8 bytes"));

	/* What is neither to be visible nor to persist, and no level at all. */
	ibv_wr_start(ex);
	begin(95, IBV_SEND_SIGNALED);
	wr_flush(7, 0, OF_RANGE);
	MUST(ibv_wr_complete(ex) == EINVAL);
	ibv_wr_start(ex);
	begin(96, IBV_SEND_SIGNALED);
	wr_flush(7, TO_GLOBAL, OF_MR + 1);
	MUST(ibv_wr_complete(ex) == EINVAL);
	MUST(!ibv_reg_mr(pd, memory, sizeof memory, ACCESS_FLUSH_PERSISTENT) && errno == EOPNOTSUPP);
}

static void asynchronous_events(void)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq_attr attr = { .srq_limit = 2 };
	struct ibv_sge sge = { (uintptr_t)memory + SIZE, SIZE, mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 5, .sg_list = &sge, .num_sge = 1 }, *bad;
	struct pollfd fd = { .fd = context->async_fd, .events = POLLIN };
	struct ibv_srq *srq = ibv_create_srq(pd, &init);
	struct ibv_async_event event;

	MUST(srq);
	set_up(srq);
	MUST(ibv_destroy_srq(srq) == EBUSY);
	MUST(ibv_post_recv(qp[1], &wr, &bad) == EINVAL && bad == &wr);
	MUST(!ibv_post_srq_recv(srq, &wr, &bad) && !ibv_post_srq_recv(srq, &wr, &bad));
	MUST(!ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT));
	MUST(poll(&fd, 1, 0) == 0);
	ibv_wr_start(ex);
	begin(18, IBV_SEND_SIGNALED);
	ibv_wr_send(ex);
	ibv_wr_set_inline_data(ex, "s", 1);
	MUST(!ibv_wr_complete(ex));
	received(5);
	sent(18, IBV_WC_SEND);
	MUST(poll(&fd, 1, GIVE_UP_MS) == 1);
	MUST(!ibv_get_async_event(context, &event));
	MUST(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED && event.element.srq == srq);
	MUST(!ibv_query_srq(srq, &attr) && attr.srq_limit == 0);
	tear_down();
	destruction_waits(destroy_srq, srq, acknowledge_async, &event);
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	MUST(list && list[0]);
	context = ibv_open_device(list[0]);
	MUST(context);
	ibv_free_device_list(list);
	pd = ibv_alloc_pd(context);
	MUST(pd);
	mr = ibv_reg_mr(pd, memory, sizeof memory,
			IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC |
			ACCESS_FLUSH_GLOBAL);
	MUST(mr);
	set_up(NULL);
	batches();
	placed();
	timestamps();
	all_or_nothing();
	lists();
	null_region();
	files();
	paced();
	windows();
	tear_down();
	set_up(NULL);
	changed_regions();
	tear_down();
	set_up(NULL);
	completion_events();
	asynchronous_events();
	MUST(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd) && !ibv_close_device(context));
	puts("good");
	return 0;
}
