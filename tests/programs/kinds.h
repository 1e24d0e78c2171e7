/* Kinds of regions and domains, for resources.c: the requester writes, reads and adds, the responder looks at all bytes. */
#ifndef KINDS_H
#define KINDS_H

/* Bytes of a region; where the requester writes (and begins to read, in the middle of what it wrote), how much, and the word to which it adds. */
#define REGION 8192u
#define WRITE_AT 64u
#define WRITTEN 3000u
#define READ_AT (WRITE_AT + WRITTEN - 500)
#define COUNTER_AT 4096u
#define ADDEND 1u /* what post_one adds */

/* What the requester is told of a region. */
struct lent {
	uint64_t addr;
	uint32_t rkey;
	uint32_t spare;
};

/* ---- The requester of all kinds -------------------------------------------------------------------------------------------- */

static void borrow(void)
{
	struct ibv_qp *qp = qp_of(IBV_QPT_RC, 0, NULL);
	struct lent lent;

	meet(qp);
	side_recv(&lent, sizeof(lent));
	one(qp, IBV_WR_RDMA_WRITE, 0, WRITTEN, lent.addr + WRITE_AT, lent.rkey, IBV_WC_SUCCESS, "WRITE");
	one(qp, IBV_WR_RDMA_READ, 8192, 1000, lent.addr + READ_AT, lent.rkey, IBV_WC_SUCCESS, "READ");
	memcpy(expected + 8192, expected + WRITTEN - 500, 500);
	peers(TARGET + WRITE_AT + WRITTEN, expected + 8192 + 500, 500);
	one(qp, IBV_WR_ATOMIC_FETCH_AND_ADD, 16384, 8, lent.addr + COUNTER_AT, lent.rkey, IBV_WC_SUCCESS, "FAA");
	peers(TARGET + COUNTER_AT, expected + 16384, 8);
	part(qp);
}

/* ---- The responders ---------------------------------------------------------------------------------------------------------- */

/* What a region holds after that. */
static void expect_region(uint8_t *to)
{
	uint64_t word;

	initial(is_client(), TARGET, to, REGION);
	peers(0, to + WRITE_AT, WRITTEN);
	memcpy(&word, to + COUNTER_AT, 8);
	word += ADDEND;
	memcpy(to + COUNTER_AT, &word, 8);
}

static void check_region(const uint8_t *is)
{
	uint8_t should[REGION];

	expect_region(should);
	for (uint32_t at = 0; at < REGION; at++)
		EXPECT(is[at] == should[at], "byte %u of the region is 0x%02x instead of 0x%02x", at, is[at], should[at]);
}

/* Lends a region by qp, until the requester is done with it. */
static void lend_by(struct ibv_qp *qp, struct ibv_mr *region, uint64_t addr)
{
	struct lent lent = {addr, region->rkey, 0};

	meet(qp);
	side_send(&lent, sizeof(lent));
	part(qp);
}

static void lend(struct ibv_mr *region, uint64_t addr)
{
	EXPECT(region != NULL, "no region: %s", strerror(errno));
	lend_by(qp_of(IBV_QPT_RC, 0, NULL), region, addr);
}

/* A region of the memory at TARGET, of which expected must tell. */
static void lend_memory(struct ibv_mr *region)
{
	lend(region, (uintptr_t)memory + TARGET);
	expect_region(expected + TARGET);
	EXPECT(ibv_dereg_mr(region) == 0, "ibv_dereg_mr failed");
}

static bool has_relaxed(bool requests)
{
	(void)requests;
	return true;
}

static void lend_relaxed(void)
{
	lend_memory(ibv_reg_mr(node.pd, memory + TARGET, REGION, ALL_REMOTE | IBV_ACCESS_RELAXED_ORDERING));
}

static bool has_paging(uint64_t capability)
{
	struct ibv_device_attr_ex attr;
	uint32_t wanted = IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ | IBV_ODP_SUPPORT_ATOMIC;

	EXPECT(ibv_query_device_ex(node.context, NULL, &attr) == 0, "ibv_query_device_ex failed");
	return attr.odp_caps.general_caps & capability && (attr.odp_caps.per_transport_caps.rc_odp_caps & wanted) == wanted;
}

static bool has_on_demand(bool requests)
{
	return requests || has_paging(IBV_ODP_SUPPORT);
}

static void lend_on_demand(void)
{
	struct ibv_mr *region = ibv_reg_mr(node.pd, memory + TARGET, REGION, ALL_REMOTE | IBV_ACCESS_ON_DEMAND);

	EXPECT(region != NULL, "ibv_reg_mr: %s", strerror(errno));
	struct ibv_sge range = {(uintptr_t)memory + TARGET, REGION, region->lkey};
	int error = ibv_advise_mr(node.pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, IBV_ADVISE_MR_FLAG_FLUSH, &range, 1);
	EXPECT(error == 0, "ibv_advise_mr: %s", strerror(error));
	lend_memory(region);
}

static bool has_implicit(bool requests)
{
	return requests || has_paging(IBV_ODP_SUPPORT_IMPLICIT);
}

static void lend_implicit(void)
{
	lend_memory(ibv_reg_mr(node.pd, NULL, SIZE_MAX, ALL_REMOTE | IBV_ACCESS_ON_DEMAND));
}

static bool has_device_memory(bool requests)
{
	struct ibv_device_attr_ex attr;

	EXPECT(ibv_query_device_ex(node.context, NULL, &attr) == 0, "ibv_query_device_ex failed");
	return requests || attr.max_dm_size >= REGION;
}

static void lend_device_memory(void)
{
	struct ibv_alloc_dm_attr attr = {.length = REGION, .log_align_req = 3};
	struct ibv_dm *dm = ibv_alloc_dm(node.context, &attr);
	uint8_t bytes[REGION];

	EXPECT(dm != NULL, "ibv_alloc_dm: %s", strerror(errno));
	EXPECT(ibv_memcpy_to_dm(dm, 0, memory + TARGET, REGION) == 0, "ibv_memcpy_to_dm failed");
	struct ibv_mr *region = ibv_reg_dm_mr(node.pd, dm, 0, REGION, ALL_REMOTE | IBV_ACCESS_ZERO_BASED);
	lend(region, 0);
	EXPECT(ibv_memcpy_from_dm(bytes, dm, 0, REGION) == 0, "ibv_memcpy_from_dm failed");
	check_region(bytes);
	EXPECT(ibv_dereg_mr(region) == 0 && ibv_free_dm(dm) == 0, "ibv_dereg_mr or ibv_free_dm failed");
}

#define IOVA 0x123456780000u

static struct ibv_mr *region_of_file(int fd)
{
	return ibv_reg_dmabuf_mr(node.pd, 0, REGION, IOVA, fd, ALL_REMOTE);
}

static int file_of_memory(void)
{
	int fd = memfd_create("region", MFD_CLOEXEC);

	EXPECT(fd >= 0 && ftruncate(fd, REGION) == 0, "memfd_create: %s", strerror(errno));
	return fd;
}

static bool has_file(bool requests)
{
	int fd = file_of_memory();
	struct ibv_mr *region = requests ? NULL : region_of_file(fd);

	close(fd);
	EXPECT(!region || ibv_dereg_mr(region) == 0, "ibv_dereg_mr failed");
	return requests || region != NULL;
}

static void lend_file(void)
{
	int fd = file_of_memory();
	uint8_t *bytes = mmap(NULL, REGION, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	EXPECT(bytes != MAP_FAILED, "mmap: %s", strerror(errno));
	memcpy(bytes, memory + TARGET, REGION);
	struct ibv_mr *region = region_of_file(fd);
	lend(region, IOVA);
	check_region(bytes);
	EXPECT(ibv_dereg_mr(region) == 0 && munmap(bytes, REGION) == 0 && close(fd) == 0, "ibv_dereg_mr failed");
}

/* The device once more, by the descriptor of its context. */
static struct ibv_context *import(void)
{
	int fd = dup(node.context->cmd_fd);
	struct ibv_context *context = ibv_import_device(fd);

	if (!context)
		close(fd);
	return context;
}

static bool has_imported(bool requests)
{
	struct ibv_context *context = requests ? NULL : import();

	EXPECT(!context || ibv_close_device(context) == 0, "ibv_close_device failed");
	return requests || context != NULL;
}

/* A region, and its domain, that another context of the process made. */
static void lend_imported(void)
{
	struct ibv_context *context = import();
	struct ibv_mr *region = mr_make(node.pd, memory + TARGET, REGION, ALL_REMOTE), *imported;
	struct ibv_pd *pd = ibv_import_pd(context, node.pd->handle);

	EXPECT(pd != NULL, "ibv_import_pd: %s", strerror(errno));
	imported = ibv_import_mr(pd, region->handle);
	EXPECT(imported != NULL, "ibv_import_mr: %s", strerror(errno));
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 1, .max_recv_wr = 1}};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);
	EXPECT(qp != NULL, "ibv_create_qp in an imported PD: %s", strerror(errno));
	lend_by(qp, imported, (uintptr_t)memory + TARGET);
	expect_region(expected + TARGET);
	ibv_unimport_mr(imported);
	EXPECT(ibv_destroy_cq(cq) == 0, "ibv_destroy_cq failed");
	ibv_unimport_pd(pd);
	EXPECT(ibv_close_device(context) == 0 && ibv_dereg_mr(region) == 0, "ibv_close_device or ibv_dereg_mr failed");
}

/* ---- A region that changes under its key --------------------------------------------------------------------------------------- */

static int reregister(struct ibv_mr *region, int flags, void *addr, int access)
{
	return ibv_rereg_mr(region, flags, NULL, addr, REGION, access);
}

static bool has_reregistered(bool requests)
{
	if (requests)
		return true;
	struct ibv_mr *region = mr_make(node.pd, memory, REGION, IBV_ACCESS_LOCAL_WRITE);
	int error = reregister(region, IBV_REREG_MR_CHANGE_ACCESS, NULL, ALL_REMOTE);
	EXPECT(ibv_dereg_mr(region) == 0, "ibv_dereg_mr failed");
	return error == 0;
}

static void request_reregistered(void)
{
	struct ibv_qp *qp = qp_of(IBV_QPT_RC, 0, NULL);
	struct lent lent;

	meet(qp);
	for (uint32_t i = 0; i < 3; i++) {
		side_recv(&lent, sizeof(lent));
		one(qp, IBV_WR_RDMA_WRITE, i * 1000, 1000, lent.addr + 100, lent.rkey, i < 2 ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR, "WRITE");
		barrier(50 + i);
	}
	part(qp);
}

/* First at TARGET, then behind, then no more for writing. */
static void respond_reregistered(void)
{
	struct ibv_mr *region = mr_make(node.pd, memory + TARGET, REGION, ALL_REMOTE);
	struct ibv_qp *qp = qp_of(IBV_QPT_RC, 0, NULL);
	uint32_t at = TARGET;

	meet(qp);
	for (uint32_t i = 0; i < 3; i++) {
		int error = i == 1 ? reregister(region, IBV_REREG_MR_CHANGE_TRANSLATION, memory + (at += REGION), 0)
			  : i == 2 ? reregister(region, IBV_REREG_MR_CHANGE_ACCESS, NULL, IBV_ACCESS_REMOTE_READ)
				   : 0;

		EXPECT(error == 0, "change %u: ibv_rereg_mr: %d, %s", i, error, strerror(errno));
		struct lent lent = {(uintptr_t)memory + at, region->rkey, 0};
		side_send(&lent, sizeof(lent));
		barrier(50 + i);
		if (i < 2)
			peers(i * 1000, expected + at + 100, 1000);
	}
	part(qp);
	EXPECT(ibv_dereg_mr(region) == 0, "ibv_dereg_mr failed");
}

/* ---- Of the requester alone --------------------------------------------------------------------------------------------------- */

static bool has_null_region(bool requests)
{
	struct ibv_mr *region = requests ? ibv_alloc_null_mr(node.pd) : NULL;

	EXPECT(!region || ibv_dereg_mr(region) == 0, "ibv_dereg_mr failed");
	return !requests || region != NULL;
}

/* A WRITE of zeros from nowhere between two pieces, and a READ of which only the ends are kept. */
static void request_null_region(void)
{
	struct ibv_mr *null = ibv_alloc_null_mr(node.pd);
	struct ibv_qp *qp = qp_of(IBV_QPT_RC, 0, NULL);
	static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ};

	EXPECT(null != NULL, "ibv_alloc_null_mr: %s", strerror(errno));
	meet(qp);
	for (uint32_t i = 0; i < 2; i++) {
		struct ibv_sge pieces[] = {
			{(uintptr_t)memory + i * 8192, 500, mr->lkey}, {0, 2000, null->lkey}, {(uintptr_t)memory + i * 8192 + 1000, 500, mr->lkey}};
		struct ibv_send_wr wr = {.wr_id = 1, .sg_list = pieces, .num_sge = 3, .opcode = opcodes[i], .send_flags = IBV_SEND_SIGNALED}, *bad;

		wr.wr.rdma.remote_addr = peer.addr + TARGET + i * 8192;
		wr.wr.rdma.rkey = peer.rkey;
		int error = ibv_post_send(qp, &wr, &bad);
		EXPECT(error == 0, "ibv_post_send: %s", strerror(error));
		done(send_cq, i == 0 ? IBV_WC_RDMA_WRITE : IBV_WC_RDMA_READ, "with a null region");
	}
	peers(TARGET + 8192, expected + 8192, 500);
	peers(TARGET + 8192 + 2500, expected + 8192 + 1000, 500);
	part(qp);
	EXPECT(ibv_dereg_mr(null) == 0, "ibv_dereg_mr failed");
}

static void respond_null_region(void)
{
	struct ibv_qp *qp = qp_of(IBV_QPT_RC, 0, NULL);

	meet(qp);
	peers(0, expected + TARGET, 500);
	memset(expected + TARGET + 500, 0, 2000);
	peers(1000, expected + TARGET + 2500, 500);
	part(qp);
}

static struct ibv_pd *parent_try(struct ibv_td *td)
{
	struct ibv_parent_domain_init_attr attr = {.pd = node.pd, .td = td};

	return td ? ibv_alloc_parent_domain(node.context, &attr) : NULL;
}

static bool has_parent_domain(bool requests)
{
	struct ibv_td_init_attr attr = {0};
	struct ibv_td *td = requests ? ibv_alloc_td(node.context, &attr) : NULL;
	struct ibv_pd *parent = parent_try(td);

	EXPECT(!parent || ibv_dealloc_pd(parent) == 0, "ibv_dealloc_pd failed");
	EXPECT(!td || ibv_dealloc_td(td) == 0, "ibv_dealloc_td failed");
	return !requests || parent != NULL;
}

/* A queue pair of a domain above the memory's. */
static void request_parent_domain(void)
{
	struct ibv_td_init_attr attr = {0};
	struct ibv_td *td = ibv_alloc_td(node.context, &attr);
	struct ibv_pd *parent = parent_try(td);

	EXPECT(parent != NULL, "ibv_alloc_parent_domain: %s", strerror(errno));
	struct ibv_qp *qp = qp_try(parent, IBV_QPT_RC, 0, NULL);
	EXPECT(qp != NULL, "ibv_create_qp in a parent domain: %s", strerror(errno));
	meet(qp);
	one(qp, IBV_WR_RDMA_WRITE, 0, 20000, peer.addr + TARGET, peer.rkey, IBV_WC_SUCCESS, "WRITE");
	part(qp);
	EXPECT(ibv_dealloc_pd(parent) == 0 && ibv_dealloc_td(td) == 0, "ibv_dealloc_pd or ibv_dealloc_td failed");
}

static void respond_parent_domain(void)
{
	struct ibv_qp *qp = qp_of(IBV_QPT_RC, 0, NULL);

	meet(qp);
	peers(0, expected + TARGET, 20000);
	part(qp);
}

#endif
