/*
 * One end is ended by kill -9 in the middle of a transfer: what the other end's requests and receives complete with.
 *
 * The server is the one that is ended. When the transfer is under way, the client listens on the TCP port that -n names: a
 * harness can see that on either side of the wire. What the client saw it prints in lines that start with "saw": the same
 * whoever the two ends are. --mode says what is transferred:
 *   write, read, atomic, send   the client requests without end
 *   receive                     the server sends without end; the client only receives, and requests when the server is gone
 */
#include "await.h"

#define PIECE 65536u
#define WINDOW 8u   /* requests under way */
#define RECEIVES 16 /* receives that are posted */
#define SPACE (RECEIVES * PIECE)

/* 4.096 us * 2^17 = 537 ms, four tries: the end must not come early on a machine that is slow. */
static const struct conduct patient = {
	.timeout = 17, .retry = 3, .rnr_retry = 7, .min_rnr_timer = 12, .access = ALL_REMOTE & ~IBV_ACCESS_LOCAL_WRITE};

static struct node node;
static struct ibv_cq *send_cq, *recv_cq;
static struct ibv_qp *qp;
static struct address peer;
static uint8_t *local, *target, expected[PIECE];
static struct ibv_mr *local_mr, *target_mr;
static enum ibv_wr_opcode opcode;

static bool mode(const char *name)
{
	return strcmp(opt.mode, name) == 0;
}

static void request(unsigned slot)
{
	bool atomic = opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
	uint32_t offset = slot * PIECE;
	int error = post_one(qp, opcode, local + offset, local_mr->lkey, atomic ? 8 : PIECE, peer.addr + offset, peer.rkey);

	CHECK(error == 0, "ibv_post_send: %s", strerror(error));
}

static void receive(unsigned slot)
{
	int error = post_recv_one(qp, target + slot * PIECE, target_mr->lkey, PIECE);

	CHECK(error == 0, "ibv_post_recv: %s", strerror(error));
}

/* Tells the harness that the transfer is under way. */
static void announce(void)
{
	struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)opt.count), .sin6_addr = in6addr_any};
	int s = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);

	CHECK(s >= 0 && bind(s, (struct sockaddr *)&any, sizeof(any)) == 0 && listen(s, 1) == 0, "port %" PRIu64 ": %s", opt.count, strerror(errno));
}

static bool peer_has_ended(void)
{
	char byte;
	ssize_t n = recv(side, &byte, 1, MSG_DONTWAIT);

	return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

/* Says how many completions of a kind there were: all the same, but for the first. */
static void take_all(struct ibv_cq *cq, unsigned count, const char *what)
{
	for (unsigned i = 0; i < count; i++) {
		struct ibv_wc wc = await_wc(cq, what);

		CHECK(wc.status == IBV_WC_WR_FLUSH_ERR, "%s %u: %s", what, i, ibv_wc_status_str(wc.status));
	}
	printf("saw %u %ss: %s\n", count, what, ibv_wc_status_str(IBV_WC_WR_FLUSH_ERR));
}

/* From the first request that fails to the last receive that is flushed. */
static void conclude(enum ibv_wc_status first, unsigned requests_behind)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	printf("saw the first request that failed: %s\n", ibv_wc_status_str(first));
	CHECK(first == IBV_WC_RETRY_EXC_ERR, "after the peer's end: %s", ibv_wc_status_str(first));
	take_all(send_cq, requests_behind, "request behind it");
	request(0);
	take_all(send_cq, 1, "request posted later");
	take_all(recv_cq, RECEIVES, "receive");
	CHECK(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) == 0, "ibv_query_qp failed");
	printf("saw the QP in state %d\n", attr.qp_state);
	CHECK(attr.qp_state == IBV_QPS_ERR, "the QP is in state %d", attr.qp_state);
}

/* The client requests until the server is gone. */
static unsigned requests_without_end(void)
{
	unsigned done;

	for (unsigned i = 0; i < WINDOW; i++)
		request(i);
	for (done = 0;; done++) {
		struct ibv_wc wc = await_wc(send_cq, "a request");
		unsigned slot = done % WINDOW;

		if (wc.status != IBV_WC_SUCCESS) {
			conclude(wc.status, WINDOW - 1);
			return done;
		}
		if (mode("read")) {
			CHECK(memcmp(local + slot * PIECE, expected, PIECE) == 0, "READ %u gave wrong bytes", done);
			memset(local + slot * PIECE, 0, PIECE);
		}
		request(slot);
		if (done == 4 * WINDOW)
			announce();
	}
}

/* The client receives until the server is gone. Of a responder nothing fails by that: its receives wait on. */
static unsigned receives_without_end(void)
{
	struct ibv_wc wc;
	unsigned done = 0;
	double quiet_since = 0;

	while (quiet_since == 0 || now_s() < quiet_since + 1) {
		bool ended = peer_has_ended();
		int n = ibv_poll_cq(recv_cq, 1, &wc);

		CHECK(n >= 0, "ibv_poll_cq: %d", n);
		if (n == 0) {
			if (ended && quiet_since == 0)
				quiet_since = now_s();
			usleep(200);
			continue;
		}
		quiet_since = 0;
		CHECK(wc.status == IBV_WC_SUCCESS && wc.byte_len == PIECE, "receive %u: %s, %u bytes", done, ibv_wc_status_str(wc.status), wc.byte_len);
		uint8_t *message = target + done % RECEIVES * PIECE;
		CHECK(memcmp(message, expected, PIECE) == 0, "message %u has wrong bytes", done);
		memset(message, 0, PIECE);
		receive(done % RECEIVES);
		if (++done == 4 * RECEIVES)
			announce();
	}
	CHECK(done >= 4 * RECEIVES, "the server ended after %u messages", done);
	printf("saw no completion of a receive by the peer's end\n");
	request(0);
	wc = await_wc(send_cq, "a request");
	conclude(wc.status, 0);
	return done;
}

/* Until the harness ends this process. */
__attribute__((noreturn)) static void server(void)
{
	if (mode("receive"))
		for (unsigned i = 0; i < WINDOW; i++)
			request(i);
	for (unsigned done = 0;; done++) {
		if (mode("receive")) {
			struct ibv_wc wc = await_wc(send_cq, "a SEND");

			CHECK(wc.status == IBV_WC_SUCCESS, "SEND %u: %s", done, ibv_wc_status_str(wc.status));
			request(done % WINDOW);
		} else if (mode("send")) {
			struct ibv_wc wc = await_wc(recv_cq, "a receive");

			CHECK(wc.status == IBV_WC_SUCCESS, "receive %u: %s", done, ibv_wc_status_str(wc.status));
			receive(done % RECEIVES);
		} else {
			pause();
		}
	}
}

int main(int argc, char **argv)
{
	parse_options(argc, argv);
	opcode = mode("write") ? IBV_WR_RDMA_WRITE : mode("read") ? IBV_WR_RDMA_READ : mode("atomic") ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_SEND;
	side_open();
	node = node_open();
	send_cq = cq_make(&node, 4 * WINDOW, NULL);
	recv_cq = cq_make(&node, 4 * RECEIVES, NULL);
	local = pages(SPACE);
	target = pages(SPACE);
	pattern(expected, 7, 0, PIECE);
	for (unsigned i = 0; i < RECEIVES; i++) {
		memcpy(local + i * PIECE, expected, PIECE);
		if (mode("read"))
			memcpy(target + i * PIECE, expected, PIECE);
	}
	local_mr = mr_make(node.pd, local, SPACE, IBV_ACCESS_LOCAL_WRITE);
	target_mr = mr_make(node.pd, target, SPACE, ALL_REMOTE);
	/* Last: Linux destroys the objects of a dead process one by one, the newest first. Were it the memory, the peer might be
	   told of a wrong key before nobody answers. */
	qp = qp_make(&node, send_cq, recv_cq, NULL, 2 * RECEIVES);
	peer = connect_with(&node, qp, target_mr, &patient);
	for (unsigned i = 0; i < RECEIVES; i++)
		receive(i);
	barrier(1);
	if (!is_client())
		server();
	unsigned done = mode("receive") ? receives_without_end() : requests_without_end();
	CHECK(ibv_destroy_qp(qp) == 0, "ibv_destroy_qp failed");
	CHECK(ibv_destroy_cq(send_cq) == 0 && ibv_destroy_cq(recv_cq) == 0, "ibv_destroy_cq failed");
	CHECK(ibv_dereg_mr(local_mr) == 0 && ibv_dereg_mr(target_mr) == 0, "ibv_dereg_mr failed");
	CHECK(ibv_dealloc_pd(node.pd) == 0 && ibv_close_device(node.context) == 0, "closing the device failed");
	ok("%u completed before", done);
	return 0;
}
