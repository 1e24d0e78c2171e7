/*
 * Threads that wait for events are cancelled again and again, asleep or about to be; the completion queue and the device go on as if
 * they had never been.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MUST(condition) do { if (!(condition)) { printf("line %d: %s (errno %d)\n", __LINE__, #condition, errno); exit(1); } } while (0)

enum { TIMES = 500, GIVE_UP_S = 60 };

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static atomic_int waiting, cleaned;

static void cleanup(void *unused)
{
	(void)unused;
	cleaned++;
}

static void *waits_for_completion(void *unused)
{
	struct ibv_cq *which;
	void *cookie;

	pthread_cleanup_push(cleanup, NULL);
	waiting = 1;
	for (;;) {
		MUST(!ibv_get_cq_event(channel, &which, &cookie));
		MUST(which == cq);
		ibv_ack_cq_events(which, 1);
	}
	pthread_cleanup_pop(0);
	return unused;
}

static void *waits_for_news(void *unused)
{
	struct ibv_async_event event;

	pthread_cleanup_push(cleanup, NULL);
	waiting = 1;
	for (;;) {
		MUST(!ibv_get_async_event(context, &event));
		ibv_ack_async_event(&event);
	}
	pthread_cleanup_pop(0);
	return unused;
}

/* Asks for cancellation, then uses the card: the request must not take effect inside. */
static void *polls(void *unused)
{
	struct ibv_wc wc;

	pthread_cleanup_push(cleanup, NULL);
	waiting = 1;
	while (waiting != 2)
		;
	for (int at = 0; at < 100; at++)
		MUST(ibv_poll_cq(cq, 1, &wc) >= 0);
	MUST(!ibv_req_notify_cq(cq, 0));
	struct ibv_mr *mr = ibv_reg_mr(pd, &wc, sizeof wc, IBV_ACCESS_LOCAL_WRITE);
	MUST(mr && !ibv_dereg_mr(mr));
	pthread_testcancel();
	MUST(!"still there");
	pthread_cleanup_pop(0);
	return unused;
}

static void cancel(void *(*run)(void *), int at)
{
	pthread_t thread;
	void *result = NULL;
	struct timespec until;
	int before = cleaned;

	waiting = 0;
	MUST(!pthread_create(&thread, NULL, run, NULL));
	while (!waiting)
		sched_yield();
	/* Now and then it has time to fall asleep. */
	if (at % 2)
		nanosleep(&(struct timespec){ .tv_nsec = 300000 }, NULL);
	MUST(!pthread_cancel(thread));
	waiting = 2;
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += GIVE_UP_S;
	MUST(!pthread_timedjoin_np(thread, &result, &until));
	MUST(result == PTHREAD_CANCELED);
	MUST(cleaned == before + 1);
}

static void to(enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = {
		.qp_state = state, .port_num = 1, .path_mtu = IBV_MTU_1024, .dest_qp_num = qp->qp_num, .max_dest_rd_atomic = 1,
		.min_rnr_timer = 12, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1,
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
	MUST(!ibv_modify_qp(qp, &attr, mask));
}

/* A message of a queue pair to itself, waited for by its event. */
static void message(void)
{
	struct ibv_recv_wr receive = { .wr_id = 1 }, *bad_receive;
	struct ibv_send_wr send = { .wr_id = 2, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad_send;
	int got = 0;

	MUST(!ibv_req_notify_cq(cq, 0));
	MUST(!ibv_post_recv(qp, &receive, &bad_receive) && !ibv_post_send(qp, &send, &bad_send));
	while (got < 2) {
		struct ibv_cq *which;
		struct ibv_wc wc;
		void *cookie;

		MUST(!ibv_get_cq_event(channel, &which, &cookie));
		MUST(which == cq && cookie == &cq);
		ibv_ack_cq_events(cq, 1);
		MUST(!ibv_req_notify_cq(cq, 0));
		while (ibv_poll_cq(cq, 1, &wc) == 1) {
			MUST(wc.status == IBV_WC_SUCCESS);
			got++;
		}
	}
}

static void set_up(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	MUST(list && list[0]);
	context = ibv_open_device(list[0]);
	ibv_free_device_list(list);
	MUST(context);
	pd = ibv_alloc_pd(context);
	channel = ibv_create_comp_channel(context);
	MUST(pd && channel);
	cq = ibv_create_cq(context, 16, &cq, channel, 0);
	MUST(cq);
	struct ibv_qp_init_attr attr = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	qp = ibv_create_qp(pd, &attr);
	MUST(qp);
	to(IBV_QPS_INIT);
	to(IBV_QPS_RTR);
	to(IBV_QPS_RTS);
}

int main(void)
{
	set_up();
	for (int at = 0; at < TIMES; at++) {
		cancel(waits_for_completion, at);
		cancel(waits_for_news, at);
		cancel(polls, at);
		if (at % 50 == 0)
			message();
	}
	message();
	MUST(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq) && !ibv_destroy_comp_channel(channel) && !ibv_dealloc_pd(pd));
	MUST(!ibv_close_device(context));
	puts("good");
	return 0;
}
