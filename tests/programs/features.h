/*
 * Features of verbs, one by one, between two processes: each is tried with either end as the requester.
 *
 * Before a feature is tried, both ends ask their device for what their part needs. Ferroce's must have everything, and rxe's exactly what
 * the feature says of it. What a device lacks is said in one line that begins with `absent`, and the feature is left out; a device that
 * lacks something else, or has it although it should not, is a fault.
 */
#ifndef FEATURES_H
#define FEATURES_H

#include "pair.h"

/* The parts of a feature. */
enum { REQUESTS = 1, RESPONDS = 2, BOTH = REQUESTS | RESPONDS };

struct feature {
	const char *name;
	/* Does this end's device have what its part needs? */
	bool (*has)(bool requests);
	void (*request)(void);
	void (*respond)(void);
	/* The parts that Linux 6.12's rxe has, with rdma-core 44. */
	int rxe;
};

/* Of the memory of each end, half is where a requester's data is, and half is what it reaches at the responder. */
#define HALF (128u << 10)
#define SPACE (2 * HALF)
#define TARGET HALF

static struct node node;
static uint8_t *memory, *expected;
static struct ibv_mr *mr;
static struct ibv_cq *send_cq, *recv_cq;
static struct address peer;
static const char *feature_name;
static uint64_t feature_key;

#define EXPECT(condition, ...)                                                                                         \
	do {                                                                                                           \
		if (!(condition)) {                                                                                    \
			fprintf(stderr, "%s: ", feature_name);                                                         \
			die(__VA_ARGS__);                                                                              \
		}                                                                                                      \
	} while (0)

/* What the memory of an end holds when a feature begins. */
static void initial(bool of_client, uint32_t offset, uint8_t *to, uint32_t length)
{
	pattern(to, mix(feature_key * 2 + of_client), offset, length);
}

/* The same of the other end. */
__attribute__((unused)) static void peers(uint32_t offset, uint8_t *to, uint32_t length)
{
	initial(!is_client(), offset, to, length);
}

/* Every byte of memory is as expected. */
__attribute__((unused)) static void compare(const char *when)
{
	for (uint32_t at = 0; at < SPACE; at++)
		EXPECT(memory[at] == expected[at], "%s: byte %u of the %s's memory is 0x%02x instead of 0x%02x", when, at,
		       is_client() ? "client" : "server", memory[at], expected[at]);
}

/* A queue pair in RESET, which has the given operations of ibv_wr_* (0: none), and an SRQ if there is one; NULL if the device lacks it. */
__attribute__((unused)) static struct ibv_qp *qp_try(struct ibv_pd *pd, enum ibv_qp_type type, uint64_t operations, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr_ex init = {
		.send_cq = send_cq,
		.recv_cq = recv_cq,
		.srq = srq,
		.qp_type = type,
		.cap = {.max_send_wr = 32, .max_recv_wr = srq ? 0 : 32, .max_send_sge = 4, .max_recv_sge = srq ? 0 : 4, .max_inline_data = 200},
		.comp_mask = IBV_QP_INIT_ATTR_PD | (operations ? IBV_QP_INIT_ATTR_SEND_OPS_FLAGS : 0),
		.pd = pd,
		.send_ops_flags = operations,
	};

	return ibv_create_qp_ex(node.context, &init);
}

__attribute__((unused)) static struct ibv_qp *qp_of(enum ibv_qp_type type, uint64_t operations, struct ibv_srq *srq)
{
	struct ibv_qp *qp = qp_try(node.pd, type, operations, srq);

	EXPECT(qp != NULL, "ibv_create_qp_ex: %s", strerror(errno));
	return qp;
}

__attribute__((unused)) static bool has_qp(enum ibv_qp_type type, uint64_t operations)
{
	struct ibv_qp *qp = qp_try(node.pd, type, operations, NULL);

	if (qp)
		EXPECT(ibv_destroy_qp(qp) == 0, "ibv_destroy_qp failed");
	return qp != NULL;
}

/* Connects qp with the peer's; both ends tell of their memory. */
__attribute__((unused)) static void meet_as(struct ibv_qp *qp, const struct conduct *conduct)
{
	peer = connect_with(&node, qp, mr, conduct);
}

__attribute__((unused)) static void meet(struct ibv_qp *qp)
{
	meet_as(qp, &usual);
}

__attribute__((unused)) static void part(struct ibv_qp *qp)
{
	barrier(2);
	EXPECT(ibv_destroy_qp(qp) == 0, "ibv_destroy_qp failed");
}

/* A receive for the bytes of this end's memory from offset on; wr_id is the offset. */
__attribute__((unused)) static void receive_at(struct ibv_qp *qp, struct ibv_srq *srq, uint32_t offset, uint32_t length)
{
	struct ibv_sge sge = {(uintptr_t)memory + offset, length, mr->lkey};
	struct ibv_recv_wr wr = {.wr_id = offset, .sg_list = &sge, .num_sge = 1}, *bad;
	int error = srq ? ibv_post_srq_recv(srq, &wr, &bad) : ibv_post_recv(qp, &wr, &bad);

	EXPECT(error == 0, "posting a receive: %s", strerror(error));
}

/* A completion that must be one of success, of this opcode. */
__attribute__((unused)) static struct ibv_wc done(struct ibv_cq *cq, unsigned opcode, const char *what)
{
	struct ibv_wc wc = wait_wc(cq, what);

	EXPECT(wc.status == IBV_WC_SUCCESS, "%s: %s", what, ibv_wc_status_str(wc.status));
	EXPECT(wc.opcode == opcode, "%s: the completion has opcode %u instead of %u", what, wc.opcode, opcode);
	return wc;
}

/* One request with local memory at offset, which must end with status. */
__attribute__((unused)) static void one(struct ibv_qp *qp, enum ibv_wr_opcode opcode, uint32_t offset, uint32_t length, uint64_t remote,
					uint32_t rkey, enum ibv_wc_status status, const char *what)
{
	enum ibv_wc_status is = do_one(qp, opcode, memory + offset, mr->lkey, length, remote, rkey);

	EXPECT(is == status, "%s: %s instead of %s", what, ibv_wc_status_str(is), ibv_wc_status_str(status));
}

static bool is_rxe(void)
{
	return strncmp(ibv_get_device_name(node.context->device), "rxe", 3) == 0;
}

/* Fills memory anew: nothing of a feature is left for the next. */
static void begin(const struct feature *feature, bool client_requests)
{
	feature_name = feature->name;
	feature_key = mix(feature_key + client_requests + opt.seed);
	initial(is_client(), 0, memory, SPACE);
	memcpy(expected, memory, SPACE);
}

static bool possible(const struct feature *feature, bool requests)
{
	int part = requests ? REQUESTS : RESPONDS;
	uint8_t mine = feature->has(requests), theirs;
	bool should = !is_rxe() || (feature->rxe & part);

	EXPECT(mine == should, "%s %s what it takes to %s", ibv_get_device_name(node.context->device), mine ? "has" : "lacks",
	       requests ? "request it" : "respond to it");
	swap(&mine, &theirs, 1);
	if (!mine || !theirs)
		printf("absent %s, %s requests: the %s lacks it\n", feature->name, requests == is_client() ? "client" : "server",
		       !mine == requests ? "requester" : "responder");
	return mine && theirs;
}

/* Tries all features, each in both directions. */
static void try_all(const struct feature *features, unsigned count)
{
	unsigned tried = 0;

	side_open();
	node = node_open();
	memory = pages(SPACE);
	expected = pages(SPACE);
	mr = mr_make(node.pd, memory, SPACE, ALL_REMOTE | IBV_ACCESS_MW_BIND);
	send_cq = cq_make(&node, 128, NULL);
	recv_cq = cq_make(&node, 128, NULL);
	for (unsigned i = 0; i < count; i++)
		for (int client_requests = 0; client_requests < 2; client_requests++) {
			bool requests = client_requests == is_client();

			begin(&features[i], client_requests);
			barrier(1000 * i + 3);
			if (!possible(&features[i], requests))
				continue;
			requests ? features[i].request() : features[i].respond();
			compare("at the end");
			printf("tried %s, %s requests\n", features[i].name, client_requests ? "client" : "server");
			tried++;
		}
	barrier(4);
	CHECK(ibv_destroy_cq(send_cq) == 0 && ibv_destroy_cq(recv_cq) == 0, "ibv_destroy_cq failed");
	CHECK(ibv_dereg_mr(mr) == 0 && ibv_dealloc_pd(node.pd) == 0, "ibv_dereg_mr or ibv_dealloc_pd failed");
	CHECK(ibv_close_device(node.context) == 0, "ibv_close_device failed");
	ok("%u tried", tried);
}

#endif
