/*
 * Asynchronous events, each by its cause. One process, whose queue pairs talk to each other; then somebody changes its interface: an
 * address comes, the interface goes down, and up again, each when the program has printed that it waits for that.
 */
#include "self.h"

#define LENGTH 8192u

static struct node node;
static struct ibv_cq *cq;
static uint8_t *memory;
static struct ibv_mr *mr;

static bool of_port(enum ibv_event_type type)
{
	return type == IBV_EVENT_PORT_ACTIVE || type == IBV_EVENT_PORT_ERR || type == IBV_EVENT_GID_CHANGE;
}

/* The next event that is of a port, or that is not. */
static struct ibv_async_event next_event(bool of_the_port, const char *wanted)
{
	struct pollfd fd = {.fd = node.context->async_fd, .events = POLLIN};
	struct ibv_async_event event;

	do {
		CHECK(poll(&fd, 1, PATIENCE_S * 1000) == 1, "no event %s within %d s", wanted, PATIENCE_S);
		CHECK(ibv_get_async_event(node.context, &event) == 0, "ibv_get_async_event: %s", strerror(errno));
		ibv_ack_async_event(&event);
	} while (of_port(event.event_type) != of_the_port);
	return event;
}

/* The event must come, of this object. */
static void await(enum ibv_event_type type, const void *object)
{
	const char *wanted = ibv_event_type_str(type);
	struct ibv_async_event event = next_event(false, wanted);

	CHECK(event.event_type == type, "event %s instead of %s", ibv_event_type_str(event.event_type), wanted);
	CHECK((const void *)event.element.qp == object, "event %s is of another object", wanted);
}

static struct ibv_qp *new_qp(void)
{
	return qp_make(&node, cq, cq, NULL, 16);
}

static void end_qps(struct ibv_qp *a, struct ibv_qp *b)
{
	CHECK(ibv_destroy_qp(a) == 0 && ibv_destroy_qp(b) == 0, "ibv_destroy_qp failed");
}

/* The first packet comes to a queue pair that is ready to receive only. */
static void communication_established(void)
{
	struct ibv_qp *a = new_qp(), *b = new_qp();
	struct address at_a = address_of(&node, a, NULL), at_b = address_of(&node, b, NULL);

	qp_init(a, &usual);
	qp_init(b, &usual);
	qp_rtr(b, &at_a, node.port.active_mtu, &usual);
	qp_rtr(a, &at_b, node.port.active_mtu, &usual);
	qp_rts(a, &at_a, &usual);
	CHECK(do_one(a, IBV_WR_RDMA_WRITE, memory, mr->lkey, 100, (uintptr_t)memory + 4096, mr->rkey) == IBV_WC_SUCCESS, "WRITE failed");
	await(IBV_EVENT_COMM_EST, b);
	end_qps(a, b);
}

/* A request that is refused: by the key, and by what the queue pair allows. */
static void refused(enum ibv_wr_opcode opcode, uint32_t rkey, int access, enum ibv_wc_status status, enum ibv_event_type event)
{
	struct ibv_qp *a = new_qp(), *b = new_qp();
	struct ibv_qp_attr attr = {.qp_access_flags = (unsigned)access};

	connect_both(&node, a, b);
	CHECK(ibv_modify_qp(b, &attr, IBV_QP_ACCESS_FLAGS) == 0, "changing qp_access_flags failed");
	enum ibv_wc_status is = do_one(a, opcode, memory, mr->lkey, 100, (uintptr_t)memory + 4096, rkey);
	CHECK(is == status, "%s instead of %s", ibv_wc_status_str(is), ibv_wc_status_str(status));
	await(event, b);
	end_qps(a, b);
}

/* The memory of a region is not there any more. */
static void memory_gone(void)
{
	uint8_t *other = pages(LENGTH);
	struct ibv_mr *gone = mr_make(node.pd, other, LENGTH, ALL_REMOTE);
	struct ibv_qp *a = new_qp(), *b = new_qp();

	connect_both(&node, a, b);
	munmap(other, LENGTH);
	enum ibv_wc_status is = do_one(a, IBV_WR_RDMA_WRITE, memory, mr->lkey, 100, (uintptr_t)other, gone->rkey);
	CHECK(is == IBV_WC_REM_OP_ERR, "a WRITE to memory that is gone: %s", ibv_wc_status_str(is));
	await(IBV_EVENT_QP_FATAL, b);
	end_qps(a, b);
	CHECK(ibv_dereg_mr(gone) == 0, "ibv_dereg_mr failed");
}

/* More completions than a queue holds. */
static void overrun(void)
{
	struct ibv_cq *small = cq_make(&node, 1, NULL);
	struct ibv_qp *a = qp_make(&node, small, cq, NULL, 200), *b = new_qp();

	connect_both(&node, a, b);
	CHECK(small->cqe < 150, "a queue of 1 has %d entries", small->cqe);
	for (int i = 0; i < small->cqe + 1; i++)
		CHECK(post_one(a, IBV_WR_RDMA_WRITE, memory, mr->lkey, 8, (uintptr_t)memory + 4096, mr->rkey) == 0, "ibv_post_send failed");
	await(IBV_EVENT_CQ_ERR, small);
	end_qps(a, b);
	CHECK(ibv_destroy_cq(small) == 0, "ibv_destroy_cq failed");
}

/* Says what it waits for; that must come next, of port 1. Addresses may come and go with the interface. */
static void await_port(enum ibv_event_type type, const char *what)
{
	struct ibv_async_event event;

	printf("waiting for %s\n", what);
	fflush(stdout);
	do
		event = next_event(true, what);
	while (event.event_type == IBV_EVENT_GID_CHANGE && type != IBV_EVENT_GID_CHANGE);
	CHECK(event.event_type == type && event.element.port_num == 1, "event %s of port %d instead of %s", ibv_event_type_str(event.event_type),
	      event.element.port_num, what);
}

int main(int argc, char **argv)
{
	parse_options(argc, argv);
	node = node_open();
	cq = cq_make(&node, 256, NULL);
	memory = pages(LENGTH);
	mr = mr_make(node.pd, memory, LENGTH, ALL_REMOTE);
	communication_established();
	refused(IBV_WR_RDMA_WRITE, mr->rkey ^ 0x5a, usual.access, IBV_WC_REM_ACCESS_ERR, IBV_EVENT_QP_ACCESS_ERR);
	refused(IBV_WR_RDMA_READ, mr->rkey, IBV_ACCESS_REMOTE_WRITE, IBV_WC_REM_INV_REQ_ERR, IBV_EVENT_QP_REQ_ERR);
	memory_gone();
	overrun();
	await_port(IBV_EVENT_GID_CHANGE, "an address");
	await_port(IBV_EVENT_PORT_ERR, "the end of the interface");
	await_port(IBV_EVENT_PORT_ACTIVE, "the interface");
	CHECK(ibv_dereg_mr(mr) == 0 && ibv_destroy_cq(cq) == 0, "ibv_dereg_mr or ibv_destroy_cq failed");
	CHECK(ibv_dealloc_pd(node.pd) == 0 && ibv_close_device(node.context) == 0, "ibv_dealloc_pd or ibv_close_device failed");
	ok("all events");
	return 0;
}
