/*
 * Traffic in both directions with checked bytes for a while, and something that disturbs it.
 *
 * Modes:
 *   (none)    just traffic
 *   fork      children are forked all the while: each finds that inherited objects answer with errors, opens the device
 *             anew, uses it and ends
 *   exec      likewise, but each child executes this program in mode self
 *   hold      one child is forked that lives as long as this process and longer, with all it inherited
 *   setuid    in the middle the process, started by root, becomes user number COUNT (-n)
 *   endless   until somebody ends the peer: then all requests must complete, the first with RETRY_EXC_ERR, within the
 *             time that timeout and retry count promise
 *   self      no peer: the device is used alone
 */
#include <grp.h>

#include "self.h"

#define SIZE (1u << 20)
#define WINDOW 8u
#define PIECE (SIZE / WINDOW)

/* 4.096 us * 2^16 = 268 ms, four tries. */
static const struct conduct patient = {
	.timeout = 16, .retry = 3, .rnr_retry = 7, .min_rnr_timer = 12, .access = ALL_REMOTE & ~IBV_ACCESS_LOCAL_WRITE};

static struct node node;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct address peer;
static uint8_t *local, *target;
static struct ibv_mr *local_mr, *target_mr;
static uint64_t rounds;

static bool mode(const char *name)
{
	return strcmp(opt.mode, name) == 0;
}

/* One WRITE of each piece, then one READ of each, then a comparison. Gives the first status that is not SUCCESS. */
static enum ibv_wc_status one_round(void)
{
	enum ibv_wc_status first = IBV_WC_SUCCESS;

	for (int reading = 0; reading < 2; reading++) {
		uint32_t length = 1 + (uint32_t)(mix(rounds) % PIECE);

		for (unsigned i = 0; i < WINDOW; i++) {
			uint8_t *piece = local + i * PIECE;

			if (reading)
				memset(piece, 0, length);
			else
				pattern(piece, rounds * WINDOW + i, 0, length);
			int error = post_one(qp, reading ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, piece, local_mr->lkey, length, peer.addr + i * PIECE, peer.rkey);
			CHECK(error == 0, "ibv_post_send: %s", strerror(error));
		}
		for (unsigned i = 0; i < WINDOW; i++) {
			enum ibv_wc_status status = wait_wc(cq, "a request").status;

			if (first == IBV_WC_SUCCESS)
				first = status;
			else
				CHECK(status == IBV_WC_WR_FLUSH_ERR, "a request behind a failed one: %s", ibv_wc_status_str(status));
		}
		if (first != IBV_WC_SUCCESS)
			return first;
		static uint8_t expected[PIECE];
		for (unsigned i = 0; reading && i < WINDOW; i++) {
			pattern(expected, rounds * WINDOW + i, 0, length);
			CHECK(memcmp(local + i * PIECE, expected, length) == 0, "round %" PRIu64 ": READ gave other bytes than were written", rounds);
		}
	}
	rounds++;
	return first;
}

/* In a forked child: what it inherited must answer with errors, promptly and without harm to the parent. */
static void inherited_objects_fail(void)
{
	struct ibv_wc wc;

	CHECK(post_one(qp, IBV_WR_RDMA_WRITE, local, local_mr->lkey, 8, peer.addr, peer.rkey) != 0, "a child could post to its parent's QP");
	CHECK(post_recv_one(qp, local, local_mr->lkey, 8) != 0, "a child could post a receive to its parent's QP");
	CHECK(ibv_poll_cq(cq, 1, &wc) <= 0, "a child found a completion in its parent's CQ");
	CHECK(ibv_reg_mr(node.pd, local, 4096, IBV_ACCESS_LOCAL_WRITE) == NULL, "a child could register in its parent's PD");
	CHECK(ibv_alloc_pd(node.context) == NULL, "a child could allocate a PD in its parent's context");
	CHECK(ibv_create_cq(node.context, 4, NULL, NULL, 0) == NULL, "a child could create a CQ in its parent's context");
}

static pid_t disturb_by_fork(char **argv)
{
	pid_t pid = fork();

	CHECK(pid >= 0, "fork: %s", strerror(errno));
	if (pid != 0)
		return pid;
	if (mode("exec")) {
		char gid[16];

		snprintf(gid, sizeof(gid), "%d", opt.gid);
		execl("/proc/self/exe", argv[0], "--mode", "self", "-g", gid, (char *)NULL);
		die("exec: %s", strerror(errno));
	}
	if (mode("hold")) {
		/* Longer than the harness lives, unless it ends us. */
		sleep(3600);
		_exit(0);
	}
	inherited_objects_fail();
	self_test_anew();
	_exit(0);
}

static void disturb_by_setuid(void)
{
	uid_t uid = (uid_t)opt.count;

	CHECK(getuid() == 0, "setuid needs a process that root started");
	CHECK(setgroups(0, NULL) == 0 && setgid(uid) == 0 && setuid(uid) == 0, "setuid: %s", strerror(errno));
	CHECK(getuid() == uid && geteuid() == uid, "setuid had no effect");
	/* The open device serves on, also new objects. */
	self_test(&node);
}

static void end_child(pid_t pid)
{
	int status;

	if (mode("hold"))
		return;
	CHECK(waitpid(pid, &status, 0) == pid, "waitpid: %s", strerror(errno));
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child ended with status 0x%x", status);
}

static void for_a_while(char **argv)
{
	double begun = now_s(), next = begun + 0.1;
	unsigned children = 0;
	pid_t child = 0;
	bool changed = false;

	while (now_s() < begun + opt.seconds) {
		enum ibv_wc_status status = one_round();

		CHECK(status == IBV_WC_SUCCESS, "round %" PRIu64 ": %s", rounds, ibv_wc_status_str(status));
		if (now_s() < next)
			continue;
		next = now_s() + 0.1;
		if (mode("fork") || mode("exec") || (mode("hold") && children == 0)) {
			if (child)
				end_child(child);
			child = disturb_by_fork(argv);
			children++;
		}
		if (mode("setuid") && !changed && now_s() > begun + opt.seconds / 2) {
			disturb_by_setuid();
			changed = true;
		}
	}
	if (child)
		end_child(child);
	CHECK(!mode("setuid") || changed, "there was no time to change the user");
	barrier(5);
	struct ibv_mr *mrs[] = {local_mr, target_mr};
	close_all(&node, qp, cq, mrs, 2);
	ok("%" PRIu64 " rounds, %u children", rounds, children);
}

static void until_peer_ends(void)
{
	const double timeout_s = 4.096e-6 * (1 << patient.timeout);
	/* The specification lets a timeout take up to four times its value. */
	const double promise_s = 4 * timeout_s * (patient.retry + 1);
	double begun;
	enum ibv_wc_status status;

	printf("running\n");
	fflush(stdout);
	do {
		begun = now_s();
		status = one_round();
	} while (status == IBV_WC_SUCCESS);
	double took = now_s() - begun;
	CHECK(status == IBV_WC_RETRY_EXC_ERR, "after the peer's end: %s", ibv_wc_status_str(status));
	CHECK(took < promise_s + 1, "the failure took %.2f s; timeout and retry count promise at most %.2f s", took, promise_s);
	ok("%" PRIu64 " rounds, then %s after %.2f s (timeout %.2f s, %d retries)", rounds, ibv_wc_status_str(status), took, timeout_s, patient.retry);
}

int main(int argc, char **argv)
{
	parse_options(argc, argv);
	if (mode("self")) {
		self_test_anew();
		ok("alone");
		return 0;
	}
	side_open();
	node = node_open();
	cq = cq_make(&node, 64, NULL);
	qp = qp_make(&node, cq, cq, NULL, 2 * WINDOW);
	local = pages(SIZE);
	target = pages(SIZE);
	local_mr = mr_make(node.pd, local, SIZE, IBV_ACCESS_LOCAL_WRITE);
	target_mr = mr_make(node.pd, target, SIZE, ALL_REMOTE);
	peer = connect_with(&node, qp, target_mr, &patient);
	if (mode("endless"))
		until_peer_ends();
	else
		for_a_while(argv);
	return 0;
}
