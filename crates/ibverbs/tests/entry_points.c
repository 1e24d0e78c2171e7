/*
 * Calls every entry point of libibverbs with the empty and absurd arguments that its contract allows, and checks the answer:
 * the right error by the right convention, no crash, no write past what the caller owns. Compiled against the distribution's
 * headers, so that the inline functions are those that programs have.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int failures;

/* The answer was `got` (and errno `error`); wanted is `want`. */
static void check(int good, const char *what, long got, int error)
{
	if (!good) {
		printf("wrong: %s gave %ld, errno %d\n", what, got, error);
		failures++;
	}
}

#define STATUS(call, want) do { errno = 0; long r_ = (call); check(r_ == (want), #call, r_, errno); } while (0)
#define MINUS(call, want) do { errno = 0; long r_ = (call); check(r_ == -1 && errno == (want), #call, r_, errno); } while (0)
#define NUL(call, want) do { errno = 0; void *r_ = (void *)(call); check(!r_ && errno == (want), #call, (long)r_, errno); } while (0)
#define TRUE(condition) check(!!(condition), #condition, 0, errno)

/* The functions behind the macros of the header. */
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

/* Younger than the distribution's headers. */
struct ibv_mr *ibv_reg_mr_ex(struct ibv_pd *pd, void *attr);
void *ibv_alloc_dmah(struct ibv_context *context, void *attr);
int ibv_dealloc_dmah(void *dmah);
int ibv_query_port_speed(struct ibv_context *context, uint32_t port, uint64_t *speed);
int ibv_dm_export_dmabuf_fd(struct ibv_dm *dm);
void *ibv_alloc_buf(struct ibv_pd *pd, size_t size, void **buf);
void ibv_free_buf(void *buf);
struct ibv_mr *ibv_reg_buf_mr(struct ibv_pd *pd, void *buf, void *addr, size_t length, int access);
int ibv_export_buf_dmabuf_fd(void *buf);
int _ibv_query_comp_cntr_caps(struct ibv_context *context, void *caps, size_t size);
void *ibv_create_comp_cntr(struct ibv_context *context, void *attr);
int ibv_destroy_comp_cntr(void *c);
int ibv_set_comp_cntr(void *c, uint64_t v);
int ibv_set_err_comp_cntr(void *c, uint64_t v);
int ibv_inc_comp_cntr(void *c, uint64_t v);
int ibv_inc_err_comp_cntr(void *c, uint64_t v);
int ibv_read_comp_cntr(void *c, uint64_t *v);
int ibv_read_err_comp_cntr(void *c, uint64_t *v);
int ibv_qp_attach_comp_cntr(struct ibv_qp *qp, void *c, void *attr);
/* Private, but used by tools of the same source package. */
int ibv_query_gid_type(struct ibv_context *context, uint8_t port, unsigned int index, int *type);
/* For providers and old connection managers; in no public header. */
int ibv_dofork_range(void *base, size_t size);
int ibv_dontfork_range(void *base, size_t size);
const char *ibv_get_sysfs_path(void);
int ibv_read_sysfs_file(const char *dir, const char *file, char *buf, size_t size);
void ibv_copy_ah_attr_from_kern(void *dst, void *src);
void ibv_copy_qp_attr_from_kern(void *dst, void *src);
void ibv_copy_path_rec_from_kern(void *dst, void *src);
void ibv_copy_path_rec_to_kern(void *dst, void *src);

static void nothing_at_all(void)
{
	struct ibv_async_event event;
	struct ibv_cq *cq;
	void *cookie;

	memset(&event, 0, sizeof event);
	MINUS(ibv_get_device_index(NULL), EINVAL);
	NUL(ibv_get_device_name(NULL), EINVAL);
	TRUE(ibv_get_device_guid(NULL) == 0);
	NUL(ibv_open_device(NULL), EINVAL);
	STATUS(ibv_close_device(NULL), EINVAL);
	ibv_free_device_list(NULL);
	NUL(ibv_import_device(-1), EBADF);
	NUL(ibv_import_device(0), EOPNOTSUPP);
	NUL(ibv_import_pd(NULL, 0), EINVAL);
	ibv_unimport_pd(NULL);
	NUL(ibv_import_mr(NULL, 0), EINVAL);
	ibv_unimport_mr(NULL);
	NUL(ibv_import_dm(NULL, 0), EINVAL);
	ibv_unimport_dm(NULL);
	MINUS(ibv_get_async_event(NULL, &event), EINVAL);
	ibv_ack_async_event(NULL);
	ibv_ack_async_event(&event);
	STATUS(ibv_query_device(NULL, NULL), EINVAL);
	STATUS(ibv_query_port(NULL, 1, NULL), EINVAL);
	MINUS(ibv_query_gid(NULL, 1, 0, NULL), EINVAL);
	STATUS(_ibv_query_gid_ex(NULL, 1, 0, NULL, 0, 0), EINVAL);
	STATUS(_ibv_query_gid_table(NULL, NULL, 0, 0, 0), -EINVAL);
	MINUS(ibv_query_gid_type(NULL, 1, 0, NULL), EINVAL);
	MINUS(ibv_query_pkey(NULL, 1, 0, NULL), EINVAL);
	MINUS(ibv_get_pkey_index(NULL, 1, 0), EINVAL);
	NUL(ibv_alloc_pd(NULL), EINVAL);
	STATUS(ibv_dealloc_pd(NULL), EINVAL);
	NUL(ibv_reg_mr(NULL, NULL, 0, 0), EINVAL);
	NUL(ibv_reg_mr_iova(NULL, NULL, 0, 0, 0), EINVAL);
	NUL(ibv_reg_mr_iova2(NULL, NULL, 0, 0, 0), EINVAL);
	NUL(ibv_reg_mr_ex(NULL, NULL), EINVAL);
	NUL(ibv_reg_dmabuf_mr(NULL, 0, 0, 0, -1, 0), EINVAL);
	MINUS(ibv_rereg_mr(NULL, 0, NULL, NULL, 0, 0), EINVAL);
	STATUS(ibv_dereg_mr(NULL), EINVAL);
	NUL(ibv_create_comp_channel(NULL), EINVAL);
	STATUS(ibv_destroy_comp_channel(NULL), EINVAL);
	NUL(ibv_create_cq(NULL, 1, NULL, NULL, 0), EINVAL);
	STATUS(ibv_resize_cq(NULL, 1), EINVAL);
	STATUS(ibv_destroy_cq(NULL), EINVAL);
	MINUS(ibv_get_cq_event(NULL, &cq, &cookie), EINVAL);
	ibv_ack_cq_events(NULL, 1);
	NUL(ibv_create_srq(NULL, NULL), EINVAL);
	STATUS(ibv_modify_srq(NULL, NULL, 0), EINVAL);
	STATUS(ibv_query_srq(NULL, NULL), EINVAL);
	STATUS(ibv_destroy_srq(NULL), EINVAL);
	NUL(ibv_create_qp(NULL, NULL), EINVAL);
	NUL(ibv_qp_to_qp_ex(NULL), EINVAL);
	STATUS(ibv_modify_qp(NULL, NULL, 0), EINVAL);
	STATUS(ibv_query_qp(NULL, NULL, 0, NULL), EINVAL);
	STATUS(ibv_query_qp_data_in_order(NULL, 0, 0), 0);
	STATUS(ibv_destroy_qp(NULL), EINVAL);
	NUL(ibv_create_ah(NULL, NULL), EINVAL);
	MINUS(ibv_init_ah_from_wc(NULL, 1, NULL, NULL, NULL), EINVAL);
	NUL(ibv_create_ah_from_wc(NULL, NULL, NULL, 1), EINVAL);
	STATUS(ibv_destroy_ah(NULL), EINVAL);
	MINUS(ibv_resolve_eth_l2_from_gid(NULL, NULL, NULL, NULL), EINVAL);
	STATUS(ibv_attach_mcast(NULL, NULL, 0), EINVAL);
	STATUS(ibv_detach_mcast(NULL, NULL, 0), EINVAL);
	STATUS(ibv_query_ece(NULL, NULL), EINVAL);
	STATUS(ibv_set_ece(NULL, NULL), EINVAL);
	ibv_copy_ah_attr_from_kern(NULL, NULL);
	ibv_copy_qp_attr_from_kern(NULL, NULL);
	ibv_copy_path_rec_from_kern(NULL, NULL);
	ibv_copy_path_rec_to_kern(NULL, NULL);
	MINUS(ibv_read_sysfs_file(NULL, NULL, NULL, 0), EINVAL);
}

static void without_objects(void)
{
	char text[4];

	STATUS(ibv_fork_init(), 0);
	STATUS(ibv_is_fork_initialized(), IBV_FORK_UNNEEDED);
	STATUS(ibv_dofork_range(NULL, 0), 0);
	STATUS(ibv_dontfork_range(NULL, 0), 0);
	STATUS(ibv_rate_to_mult(-1), -1);
	STATUS(ibv_rate_to_mbps(99), -1);
	STATUS(mult_to_ibv_rate(-5), IBV_RATE_MAX);
	STATUS(mbps_to_ibv_rate(100), IBV_RATE_MAX);
	STATUS(ibv_rate_to_mbps(IBV_RATE_100_GBPS), 103125);
	TRUE(!strcmp(ibv_wc_status_str(-1), "unknown"));
	TRUE(!strcmp(ibv_wc_status_str(IBV_WC_RETRY_EXC_ERR), "transport retry counter exceeded"));
	TRUE(!strcmp(ibv_port_state_str(1 << 30), "invalid state"));
	TRUE(!strcmp(ibv_event_type_str(-7), "unknown"));
	TRUE(!strcmp(ibv_node_type_str(99), "unknown"));
	TRUE(!strcmp(ibv_get_sysfs_path(), "/sys"));
	MINUS(ibv_read_sysfs_file("/nowhere", "at/all", text, sizeof text), ENOENT);
	STATUS(ibv_read_sysfs_file("/proc/self", "status", text, sizeof text), sizeof text - 1);
	TRUE(text[3] == 0);
}

static void younger_than_the_headers(struct ibv_context *context)
{
	uint64_t number = 0;
	void *buf = NULL;

	NUL(ibv_alloc_dmah(context, NULL), EOPNOTSUPP);
	STATUS(ibv_dealloc_dmah(NULL), EOPNOTSUPP);
	STATUS(ibv_query_port_speed(context, 1, &number), 0);
	TRUE(number > 0);
	STATUS(ibv_query_port_speed(context, 2, &number), EINVAL);
	MINUS(ibv_dm_export_dmabuf_fd(NULL), EINVAL);
	NUL(ibv_alloc_buf(NULL, 1, &buf), EOPNOTSUPP);
	ibv_free_buf(NULL);
	NUL(ibv_reg_buf_mr(NULL, NULL, NULL, 0, 0), EOPNOTSUPP);
	MINUS(ibv_export_buf_dmabuf_fd(NULL), EOPNOTSUPP);
	STATUS(_ibv_query_comp_cntr_caps(context, NULL, 0), EOPNOTSUPP);
	NUL(ibv_create_comp_cntr(context, NULL), EOPNOTSUPP);
	STATUS(ibv_destroy_comp_cntr(NULL), EOPNOTSUPP);
	STATUS(ibv_set_comp_cntr(NULL, 0), EOPNOTSUPP);
	STATUS(ibv_set_err_comp_cntr(NULL, 0), EOPNOTSUPP);
	STATUS(ibv_inc_comp_cntr(NULL, 0), EOPNOTSUPP);
	STATUS(ibv_inc_err_comp_cntr(NULL, 0), EOPNOTSUPP);
	STATUS(ibv_read_comp_cntr(NULL, &number), EOPNOTSUPP);
	STATUS(ibv_read_err_comp_cntr(NULL, &number), EOPNOTSUPP);
	STATUS(ibv_qp_attach_comp_cntr(NULL, NULL, NULL), EOPNOTSUPP);
}

/* Memory with a guard behind it that nobody may touch. */
struct guarded {
	unsigned char room[512];
};

static void guard(struct guarded *guarded)
{
	memset(guarded, 0xa5, sizeof *guarded);
}

static int untouched_from(const struct guarded *guarded, size_t from)
{
	for (size_t at = from; at < sizeof guarded->room; at++)
		if (guarded->room[at] != 0xa5)
			return 0;
	return 1;
}

static void questions(struct ibv_context *context)
{
	struct verbs_context *verbs = verbs_get_ctx(context);
	struct ibv_query_device_ex_input input = { .comp_mask = 1 };
	struct ibv_device_attr_ex attr_ex;
	struct ibv_device_attr attr;
	struct ibv_port_attr port;
	struct ibv_gid_entry entries[512];
	struct ibv_gid_entry entry;
	union ibv_gid gid;
	struct guarded guarded;
	uint16_t pkey;
	ssize_t count;
	int type;

	STATUS(ibv_query_device(context, NULL), EINVAL);
	STATUS(ibv_query_device(context, &attr), 0);
	TRUE(attr.phys_port_cnt == 1 && attr.max_pkeys == 1 && attr.vendor_id && attr.node_guid);
	STATUS(ibv_query_device_ex(context, &input, &attr_ex), EINVAL);
	STATUS(verbs->query_device_ex(context, &input, &attr_ex, sizeof attr_ex), EINVAL);
	STATUS(verbs->query_device_ex(context, NULL, &attr_ex, 100), EINVAL);
	STATUS(verbs->query_device_ex(context, NULL, NULL, sizeof attr_ex), EINVAL);
	for (size_t size = sizeof attr; size <= 480; size += 8) {
		guard(&guarded);
		STATUS(verbs->query_device_ex(context, NULL, (void *)&guarded, size), 0);
		TRUE(untouched_from(&guarded, size));
		TRUE(!memcmp(&guarded, &attr, sizeof attr));
		TRUE(size <= 400 || guarded.room[size - 1] == 0);
	}

	STATUS(ibv_query_port(context, 1, NULL), EINVAL);
	STATUS(ibv_query_port(context, 0, (void *)&port), EINVAL);
	STATUS(ibv_query_port(context, 2, (void *)&port), EINVAL);
	guard(&guarded);
	STATUS(ibv_query_port(context, 1, (void *)&guarded), 0);
	TRUE(untouched_from(&guarded, 48));
	STATUS(verbs->query_port(context, 1, NULL, sizeof port), EINVAL);
	STATUS(verbs->query_port(context, 1, &port, 47), EINVAL);
	STATUS(verbs->query_port(context, 9, &port, sizeof port), EINVAL);
	for (size_t size = 48; size <= 72; size += 4) {
		guard(&guarded);
		STATUS(verbs->query_port(context, 1, (void *)&guarded, size), 0);
		TRUE(untouched_from(&guarded, size));
	}
	STATUS(___ibv_query_port(context, 1, &port), 0);
	TRUE(port.link_layer == IBV_LINK_LAYER_ETHERNET && port.gid_tbl_len >= 4 && port.pkey_tbl_len == 1);

	MINUS(ibv_query_gid(context, 1, 0, NULL), EINVAL);
	MINUS(ibv_query_gid(context, 1, -1, &gid), EINVAL);
	MINUS(ibv_query_gid(context, 1, 1 << 30, &gid), EINVAL);
	MINUS(ibv_query_gid(context, 0, 0, &gid), EINVAL);
	STATUS(ibv_query_gid(context, 1, 0, &gid), 0);
	STATUS(ibv_query_gid_ex(context, 2, 0, &entry, 0), EINVAL);
	STATUS(ibv_query_gid_ex(context, 1, 0, &entry, 1), EINVAL);
	STATUS(ibv_query_gid_ex(context, 1, 0, NULL, 0), EINVAL);
	STATUS(ibv_query_gid_ex(context, 1, 1 << 20, &entry, 0), EINVAL);
	STATUS(ibv_query_gid_ex(context, 1, port.gid_tbl_len - 1, &entry, 0), ENODATA);
	STATUS(ibv_query_gid_ex(context, 1, 0, &entry, 0), 0);
	TRUE(!memcmp(&gid, &entry.gid, sizeof gid) && entry.gid_type == IBV_GID_TYPE_ROCE_V2);
	STATUS(_ibv_query_gid_ex(context, 1, 0, &entry, 0, 8), EINVAL);
	guard(&guarded);
	STATUS(_ibv_query_gid_ex(context, 1, 0, (void *)&guarded, 0, 48), 0);
	TRUE(untouched_from(&guarded, 48) && guarded.room[47] == 0);
	STATUS(ibv_query_gid_table(context, entries, 0, 0), -EINVAL);
	STATUS(ibv_query_gid_table(context, entries, 512, 1), -EINVAL);
	STATUS(ibv_query_gid_table(context, NULL, 512, 0), -EINVAL);
	count = ibv_query_gid_table(context, entries, 512, 0);
	check(count >= 4 && count < 512, "ibv_query_gid_table", count, errno);
	/* Elements of a newer, longer form: the distance between them is what the caller says. */
	memset(entries, 0xa5, sizeof entries);
	STATUS(_ibv_query_gid_table(context, entries, 128, 0, 64), count);
	TRUE(entries[2].gid_index == 1 && entries[2].port_num == 1 && entries[1].gid_index == 0);
	MINUS(ibv_query_gid_type(context, 1, 1 << 20, &type), EINVAL);
	STATUS(ibv_query_gid_type(context, 1, 0, &type), 0);
	TRUE(type == 1);

	MINUS(ibv_query_pkey(context, 1, 1, &pkey), EINVAL);
	MINUS(ibv_query_pkey(context, 1, 0, NULL), EINVAL);
	STATUS(ibv_query_pkey(context, 1, 0, &pkey), 0);
	TRUE(pkey == 0xffff);
	STATUS(ibv_get_pkey_index(context, 1, pkey), 0);
	MINUS(ibv_get_pkey_index(context, 1, 0), EINVAL);
}

/* What the inline functions reach through the tables, for verbs that are not there. */
static void missing_verbs(struct ibv_context *context, struct ibv_qp *qp)
{
	struct ibv_flow_action action = { .context = context };
	struct ibv_qp_rate_limit_attr rate = { 0 };

	NUL(ibv_create_flow_action_esp(context, NULL), EOPNOTSUPP);
	STATUS(ibv_modify_flow_action_esp(&action, NULL), EOPNOTSUPP);
	STATUS(ibv_destroy_flow_action(&action), EOPNOTSUPP);
	STATUS(ibv_modify_qp_rate_limit(qp, &rate), EINVAL);
	rate.comp_mask = 1;
	STATUS(ibv_modify_qp_rate_limit(qp, &rate), EOPNOTSUPP);
	STATUS(ibv_modify_qp_rate_limit(qp, NULL), EINVAL);
	STATUS(ibv_attach_mcast(qp, NULL, 0), EINVAL);
	STATUS(ibv_detach_mcast(qp, NULL, 0), EINVAL);
}

static void counters(struct ibv_context *context)
{
	struct ibv_counters_init_attr init = { .comp_mask = 1 };
	struct ibv_counter_attach_attr attr = { .counter_desc = IBV_COUNTER_BYTES, .index = 1 };
	struct ibv_flow flow = { .context = context };
	struct ibv_counters *counters;
	uint64_t values[2] = { 5, 5 };

	NUL(ibv_create_counters(context, &init), EOPNOTSUPP);
	init.comp_mask = 0;
	counters = ibv_create_counters(context, &init);
	TRUE(counters && counters->context == context);
	if (!counters)
		return;
	STATUS(ibv_attach_counters_point_flow(counters, NULL, NULL), EINVAL);
	STATUS(ibv_attach_counters_point_flow(counters, &attr, &flow), EOPNOTSUPP);
	attr.counter_desc = 2;
	STATUS(ibv_attach_counters_point_flow(counters, &attr, NULL), EOPNOTSUPP);
	attr.counter_desc = IBV_COUNTER_BYTES;
	STATUS(ibv_attach_counters_point_flow(counters, &attr, NULL), 0);
	STATUS(ibv_read_counters(counters, values, 1, 0), EINVAL);
	STATUS(ibv_read_counters(counters, NULL, 2, 0), EINVAL);
	STATUS(ibv_read_counters(counters, values, 2, 1 << 5), EINVAL);
	values[0] = values[1] = 5;
	STATUS(ibv_read_counters(counters, values, 2, IBV_READ_COUNTERS_ATTR_PREFER_CACHED), 0);
	TRUE(values[0] == 0 && values[1] == 0);
	STATUS(ibv_destroy_counters(counters), 0);
}

static void tag_matching(struct ibv_context *context, struct ibv_pd *pd)
{
	struct ibv_srq_init_attr basic_init = { .attr = { .max_wr = 1, .max_sge = 1 } };
	struct ibv_srq *srq, *basic = ibv_create_srq(pd, &basic_init);
	struct ibv_cq *cq = ibv_create_cq(context, 8, NULL, NULL, 0);
	struct ibv_srq_init_attr_ex init = {
		.attr = { .max_wr = 4, .max_sge = 1 }, .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_CQ,
		.srq_type = IBV_SRQT_TM, .pd = pd, .cq = cq, .tm_cap = { .max_num_tags = 2, .max_ops = 4 },
	};
	struct ibv_ops_wr op[3] = { { .wr_id = 1, .next = op + 1 }, { .wr_id = 2, .next = op + 2 }, { .wr_id = 3 } }, *bad = NULL;
	struct ibv_qp_init_attr qp_init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UD, .cap = { .max_send_wr = 1, .max_send_sge = 1 },
	};
	struct ibv_device_attr_ex attr;
	struct ibv_wc wc;

	TRUE(basic && cq);
	STATUS(ibv_query_device_ex(context, NULL, &attr), 0);
	TRUE(attr.tm_caps.flags == IBV_TM_CAP_RC && attr.tm_caps.max_num_tags > 1 && attr.tm_caps.max_rndv_hdr_size >= 32);
	STATUS(ibv_post_srq_ops(basic, op, &bad), EINVAL);
	TRUE(bad == op);
	NUL(ibv_create_srq_ex(context, &init), EINVAL);
	init.comp_mask |= IBV_SRQ_INIT_ATTR_TM;
	init.tm_cap.max_num_tags = attr.tm_caps.max_num_tags + 1;
	NUL(ibv_create_srq_ex(context, &init), EINVAL);
	init.tm_cap.max_num_tags = 2;
	init.tm_cap.max_ops = attr.tm_caps.max_ops + 1;
	NUL(ibv_create_srq_ex(context, &init), EINVAL);
	init.tm_cap.max_ops = 4;
	init.cq = NULL;
	NUL(ibv_create_srq_ex(context, &init), EINVAL);
	init.cq = cq;
	srq = ibv_create_srq_ex(context, &init);
	TRUE(srq);
	if (!srq)
		return;
	/* The third does not fit; those before it are in. */
	STATUS(ibv_post_srq_ops(srq, op, &bad), ENOMEM);
	TRUE(bad == op + 2 && op[0].tm.handle != op[1].tm.handle);
	op[0].next = NULL;
	op[0].opcode = IBV_WR_TAG_DEL;
	op[0].flags = IBV_OPS_SIGNALED;
	STATUS(ibv_post_srq_ops(srq, op, &bad), 0);
	STATUS(ibv_poll_cq(cq, 1, &wc), 1);
	TRUE(wc.wr_id == 1 && wc.opcode == IBV_WC_TM_DEL && wc.status == IBV_WC_SUCCESS && wc.wc_flags == 0);
	op[0].flags = 0;
	STATUS(ibv_post_srq_ops(srq, op, &bad), 0);
	STATUS(ibv_poll_cq(cq, 1, &wc), 1);
	TRUE(wc.wr_id == 1 && wc.opcode == IBV_WC_TM_DEL && wc.status == IBV_WC_TM_ERR);
	op[0].opcode = 3;
	STATUS(ibv_post_srq_ops(srq, op, &bad), EINVAL);
	op[0].opcode = IBV_WR_TAG_SYNC;
	op[0].flags = 1 << 5;
	STATUS(ibv_post_srq_ops(srq, op, &bad), EINVAL);
	qp_init.srq = srq;
	NUL(ibv_create_qp(pd, &qp_init), EINVAL);
	STATUS(ibv_destroy_cq(cq), EBUSY);
	STATUS(ibv_destroy_srq(srq), 0);
	STATUS(ibv_destroy_srq(basic), 0);
	STATUS(ibv_destroy_cq(cq), 0);
}

static struct ibv_xrcd *open_domain(struct ibv_context *context, int fd, int oflags)
{
	struct ibv_xrcd_init_attr attr = {
		.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = fd, .oflags = oflags
	};

	return ibv_open_xrcd(context, &attr);
}

/* XRC: domains with and without a name, numbered SRQs, the two ends, a target that is open twice. */
static void xrc(struct ibv_context *context, struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_xrcd_init_attr none = { 0 };
	struct ibv_srq_init_attr_ex srq_init = {
		.attr = { .max_wr = 4, .max_sge = 1 },
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD,
		.srq_type = IBV_SRQT_XRC,
		.pd = pd,
		.cq = cq,
	};
	struct ibv_qp_init_attr_ex target_init = { .qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd };
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_XRC_SEND, .send_cq = cq, .cap = { .max_send_wr = 4, .max_send_sge = 1 }
	};
	struct ibv_qp_open_attr open_attr = { .comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_TYPE };
	struct ibv_recv_wr receive = { .wr_id = 1 }, *bad;
	struct ibv_xrcd *unnamed, *named, *same;
	struct ibv_qp *initiator, *target, *again;
	struct ibv_srq_init_attr basic_init = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *first, *second, *basic;
	uint32_t numbers[2] = { 0 };
	FILE *file = tmpfile();

	TRUE(file != NULL);
	NUL(ibv_open_xrcd(context, NULL), EINVAL);
	NUL(ibv_open_xrcd(context, &none), EINVAL);
	NUL(open_domain(context, -1, 0), EINVAL);
	NUL(open_domain(context, -1, O_TRUNC), EINVAL);
	NUL(open_domain(context, 1000000, O_CREAT), EBADF);
	NUL(open_domain(context, fileno(file), 0), EAGAIN);
	TRUE((unnamed = open_domain(context, -1, O_CREAT)) != NULL);
	TRUE((named = open_domain(context, fileno(file), O_CREAT | O_EXCL)) != NULL);
	NUL(open_domain(context, fileno(file), O_CREAT | O_EXCL), EINVAL);
	TRUE((same = open_domain(context, fileno(file), 0)) != NULL);

	TRUE((basic = ibv_create_srq(pd, &basic_init)) != NULL);
	STATUS(ibv_get_srq_num(basic, numbers), EOPNOTSUPP);
	STATUS(ibv_destroy_srq(basic), 0);
	srq_init.xrcd = named;
	NUL(ibv_create_srq_ex(context, &srq_init), EINVAL);
	srq_init.comp_mask |= IBV_SRQ_INIT_ATTR_CQ;
	TRUE((first = ibv_create_srq_ex(context, &srq_init)) != NULL);
	srq_init.xrcd = unnamed;
	TRUE((second = ibv_create_srq_ex(context, &srq_init)) != NULL);
	STATUS(ibv_get_srq_num(first, NULL), EINVAL);
	STATUS(ibv_get_srq_num(first, &numbers[0]), 0);
	STATUS(ibv_get_srq_num(second, &numbers[1]), 0);
	TRUE(numbers[0] != 0 && numbers[1] != 0 && numbers[0] != numbers[1]);
	STATUS(ibv_destroy_cq(cq), EBUSY);
	STATUS(ibv_close_xrcd(unnamed), EBUSY);
	STATUS(ibv_destroy_srq(second), 0);
	STATUS(ibv_close_xrcd(unnamed), 0);

	TRUE((initiator = ibv_create_qp(pd, &init)) != NULL);
	TRUE(initiator->recv_cq == NULL && initiator->srq == NULL);
	STATUS(ibv_post_recv(initiator, &receive, &bad), EINVAL);
	init.srq = first;
	init.recv_cq = cq;
	init.qp_type = IBV_QPT_RC;
	NUL(ibv_create_qp(pd, &init), EINVAL);
	init.qp_type = IBV_QPT_XRC_RECV;
	NUL(ibv_create_qp(pd, &init), EINVAL);
	NUL(ibv_create_qp_ex(context, &target_init), EINVAL);
	target_init.comp_mask = IBV_QP_INIT_ATTR_XRCD;
	target_init.xrcd = named;
	TRUE((target = ibv_create_qp_ex(context, &target_init)) != NULL);
	TRUE(target->pd == NULL && target->send_cq == NULL && target->qp_type == IBV_QPT_XRC_RECV);

	open_attr.qp_num = target->qp_num;
	open_attr.qp_type = IBV_QPT_XRC_RECV;
	NUL(ibv_open_qp(context, &open_attr), EINVAL);
	open_attr.comp_mask |= IBV_QP_OPEN_ATTR_XRCD;
	open_attr.xrcd = same;
	TRUE((again = ibv_open_qp(context, &open_attr)) != NULL);
	TRUE(again->qp_num == target->qp_num);
	STATUS(ibv_destroy_qp(target), 0);
	STATUS(ibv_close_xrcd(same), EBUSY);
	STATUS(ibv_destroy_qp(again), 0);
	NUL(ibv_open_qp(context, &open_attr), EINVAL);
	STATUS(ibv_close_xrcd(same), 0);
	STATUS(ibv_close_xrcd(named), EBUSY);
	STATUS(ibv_destroy_srq(first), 0);
	STATUS(ibv_close_xrcd(named), 0);
	STATUS(ibv_destroy_qp(initiator), 0);
	fclose(file);
}

static void table_shape(struct ibv_context *context)
{
	struct verbs_context *verbs = verbs_get_ctx(context);

	TRUE(verbs && verbs->sz >= sizeof *verbs);
	if (!verbs)
		return;
	TRUE((void *)verbs->ABI_placeholder1 == (void *)verbs->ibv_create_flow);
	TRUE((void *)verbs->ABI_placeholder2 == (void *)verbs->ibv_destroy_flow);
	TRUE(context->num_comp_vectors >= 1);
	TRUE(fcntl(context->async_fd, F_GETFL) >= 0);
	TRUE(fcntl(context->cmd_fd, F_GETFL) >= 0);
}

static void completion_queues(struct ibv_context *context, struct ibv_comp_channel *channel)
{
	struct ibv_cq_init_attr_ex ex = { .cqe = 4 };
	struct ibv_poll_cq_attr poll_attr = { .comp_mask = 1 };
	struct ibv_modify_cq_attr modify = { .attr_mask = IBV_CQ_ATTR_RESERVED };
	struct ibv_cq *cq, *event_cq = NULL;
	struct ibv_cq_ex *cq_ex;
	struct ibv_wc wc;
	void *cookie = NULL;

	NUL(ibv_create_cq(context, 0, NULL, NULL, 0), EINVAL);
	NUL(ibv_create_cq(context, -1, NULL, NULL, 0), EINVAL);
	NUL(ibv_create_cq(context, 1 << 30, NULL, NULL, 0), EINVAL);
	NUL(ibv_create_cq(context, 1, NULL, NULL, -1), EINVAL);
	NUL(ibv_create_cq(context, 1, NULL, NULL, context->num_comp_vectors), EINVAL);
	cq = ibv_create_cq(context, 3, &cookie, channel, 0);
	TRUE(cq && cq->cqe >= 3 && cq->cq_context == &cookie && cq->channel == channel && cq->context == context);
	if (!cq)
		return;
	TRUE(channel->refcnt == 1);
	STATUS(ibv_destroy_comp_channel(channel), EBUSY);
	STATUS(ibv_poll_cq(cq, 0, NULL), 0);
	STATUS(ibv_poll_cq(cq, 1, &wc), 0);
	check(ibv_poll_cq(cq, -1, &wc) < 0, "ibv_poll_cq(cq, -1, &wc)", 0, errno);
	check(ibv_poll_cq(cq, 1, NULL) < 0, "ibv_poll_cq(cq, 1, NULL)", 0, errno);
	STATUS(ibv_req_notify_cq(cq, 1), 0);
	STATUS(ibv_req_notify_cq(cq, 0), 0);
	STATUS(ibv_resize_cq(cq, 0), EINVAL);
	STATUS(ibv_resize_cq(cq, -3), EINVAL);
	STATUS(ibv_resize_cq(cq, 1 << 30), EINVAL);
	STATUS(ibv_resize_cq(cq, 10), 0);
	TRUE(cq->cqe >= 10);
	STATUS(ibv_modify_cq(cq, &modify), EINVAL);
	STATUS(ibv_modify_cq(cq, NULL), EINVAL);
	modify.attr_mask = IBV_CQ_ATTR_MODERATE;
	STATUS(ibv_modify_cq(cq, &modify), 0);
	MINUS(ibv_get_cq_event(channel, NULL, NULL), EINVAL);
	fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK);
	MINUS(ibv_get_cq_event(channel, &event_cq, &cookie), EAGAIN);
	ibv_ack_cq_events(cq, 0);
	STATUS(ibv_destroy_cq(cq), 0);
	TRUE(channel->refcnt == 0);

	NUL(ibv_create_cq_ex(context, NULL), EINVAL);
	ex.wc_flags = 1ULL << 60;
	NUL(ibv_create_cq_ex(context, &ex), EOPNOTSUPP);
	ex.wc_flags = IBV_WC_STANDARD_FLAGS;
	ex.comp_mask = 1 << 20;
	NUL(ibv_create_cq_ex(context, &ex), EOPNOTSUPP);
	ex.comp_mask = 0;
	ex.comp_vector = 1 << 20;
	NUL(ibv_create_cq_ex(context, &ex), EINVAL);
	ex.comp_vector = 0;
	cq_ex = ibv_create_cq_ex(context, &ex);
	TRUE(cq_ex);
	if (!cq_ex)
		return;
	STATUS(ibv_start_poll(cq_ex, &poll_attr), EINVAL);
	poll_attr.comp_mask = 0;
	STATUS(ibv_start_poll(cq_ex, &poll_attr), ENOENT);
	STATUS(ibv_start_poll(cq_ex, &poll_attr), ENOENT);
	STATUS(ibv_next_poll(cq_ex), EINVAL);
	ibv_end_poll(cq_ex);
	/* Nothing was found; still every function must answer. */
	ibv_wc_read_opcode(cq_ex);
	ibv_wc_read_vendor_err(cq_ex);
	ibv_wc_read_byte_len(cq_ex);
	ibv_wc_read_imm_data(cq_ex);
	ibv_wc_read_invalidated_rkey(cq_ex);
	ibv_wc_read_qp_num(cq_ex);
	ibv_wc_read_src_qp(cq_ex);
	ibv_wc_read_wc_flags(cq_ex);
	ibv_wc_read_slid(cq_ex);
	ibv_wc_read_sl(cq_ex);
	ibv_wc_read_dlid_path_bits(cq_ex);
	ibv_wc_read_completion_ts(cq_ex);
	ibv_wc_read_completion_wallclock_ns(cq_ex);
	ibv_wc_read_cvlan(cq_ex);
	ibv_wc_read_flow_tag(cq_ex);
	ibv_wc_read_tm_info(cq_ex, NULL);
	STATUS(ibv_destroy_cq(ibv_cq_ex_to_cq(cq_ex)), 0);
}

static void regions(struct ibv_pd *pd)
{
	static char memory[8192];
	struct ibv_mr *mr;

	NUL(ibv_reg_mr(pd, memory, 0, 0), EINVAL);
	NUL(ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_REMOTE_WRITE), EINVAL);
	NUL(ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_REMOTE_ATOMIC), EINVAL);
	NUL(ibv_reg_mr(pd, memory, sizeof memory, 1 << 18), EOPNOTSUPP);
	NUL(ibv_reg_mr(pd, (void *)-4096L, 8192, 0), EINVAL);
	NUL(ibv_reg_mr(pd, (void *)4096, 4096, 0), EFAULT);
	NUL(ibv_reg_dmabuf_mr(pd, 0, 4096, 0, -1, 0), EBADF);
	NUL(ibv_reg_dmabuf_mr(pd, 0, 4096, 0, 1 << 20, 0), EBADF);
	mr = ibv_alloc_null_mr(pd);
	TRUE(mr && mr->pd == pd && mr->context == pd->context && mr->length == SIZE_MAX && mr->lkey && !mr->rkey);
	if (mr)
		STATUS(ibv_dereg_mr(mr), 0);
	mr = ibv_reg_mr_iova2(pd, memory, sizeof memory, (uintptr_t)memory, IBV_ACCESS_LOCAL_WRITE | 1 << 29);
	TRUE(mr && mr->pd == pd && mr->context == pd->context && mr->addr == memory && mr->length == sizeof memory);
	STATUS(ibv_dealloc_pd(pd), EBUSY);
	if (mr)
		STATUS(ibv_dereg_mr(mr), 0);
	mr = ibv_reg_mr_iova(pd, memory, sizeof memory, 0x10000, IBV_ACCESS_REMOTE_READ);
	TRUE(mr);
	if (mr)
		STATUS(ibv_dereg_mr(mr), 0);
}

static void device_memory(struct ibv_pd *pd)
{
	struct ibv_alloc_dm_attr attr = { .length = 0 };
	struct ibv_dm *dm, *imported;
	struct ibv_mr *mr;
	char data[8] = "1234567", back[8] = "";

	NUL(ibv_alloc_dm(pd->context, NULL), EINVAL);
	NUL(ibv_alloc_dm(pd->context, &attr), EINVAL);
	attr.length = (size_t)1 << 50;
	NUL(ibv_alloc_dm(pd->context, &attr), ENOMEM);
	attr.length = 64;
	attr.log_align_req = 40;
	NUL(ibv_alloc_dm(pd->context, &attr), EINVAL);
	attr.log_align_req = 6;
	attr.comp_mask = 1;
	NUL(ibv_alloc_dm(pd->context, &attr), EOPNOTSUPP);
	attr.comp_mask = 0;
	dm = ibv_alloc_dm(pd->context, &attr);
	TRUE(dm && dm->context == pd->context);
	if (!dm)
		return;
	STATUS(ibv_memcpy_to_dm(dm, 1, data, 8), EINVAL);
	STATUS(ibv_memcpy_to_dm(dm, 60, data, 8), EINVAL);
	STATUS(ibv_memcpy_to_dm(dm, 0, NULL, 8), EINVAL);
	STATUS(ibv_memcpy_from_dm(NULL, dm, 0, 8), EINVAL);
	STATUS(ibv_memcpy_to_dm(dm, 56, data, 8), 0);
	STATUS(ibv_memcpy_from_dm(back, dm, 56, 8), 0);
	TRUE(!memcmp(data, back, 8));
	NUL(ibv_reg_dm_mr(pd, dm, 0, 64, IBV_ACCESS_LOCAL_WRITE), EINVAL);
	NUL(ibv_reg_dm_mr(pd, dm, 0, 68, IBV_ACCESS_ZERO_BASED), EINVAL);
	NUL(ibv_reg_dm_mr(pd, NULL, 0, 64, IBV_ACCESS_ZERO_BASED), EINVAL);
	mr = ibv_reg_dm_mr(pd, dm, 0, 64, IBV_ACCESS_ZERO_BASED);
	TRUE(mr && mr->length == 64);
	STATUS(ibv_free_dm(dm), EBUSY);
	if (mr)
		STATUS(ibv_dereg_mr(mr), 0);
	NUL(ibv_import_dm(pd->context, ~0u), ENOENT);
	imported = ibv_import_dm(pd->context, dm->handle);
	TRUE(imported);
	if (imported) {
		memset(back, 0, sizeof back);
		STATUS(ibv_memcpy_from_dm(back, imported, 56, 8), 0);
		TRUE(!memcmp(data, back, 8));
		STATUS(ibv_free_dm(dm), EBUSY);
		ibv_unimport_dm(imported);
	}
	STATUS(ibv_free_dm(dm), 0);
}

static void advice(struct ibv_pd *pd)
{
	static char memory[8192];
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_sge sge = { .addr = (uintptr_t)memory, .length = sizeof memory };

	TRUE(mr);
	if (!mr)
		return;
	sge.lkey = mr->lkey;
	STATUS(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, NULL, 0), EINVAL);
	STATUS(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 1 << 9, &sge, 1), EINVAL);
	STATUS(ibv_advise_mr(pd, 77, 0, &sge, 1), EOPNOTSUPP);
	STATUS(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1), 0);
	sge.length++;
	STATUS(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1), EFAULT);
	sge.lkey = 0;
	STATUS(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1), ENOENT);
	STATUS(ibv_dereg_mr(mr), 0);
	/* All of the address space. */
	mr = ibv_reg_mr(pd, NULL, SIZE_MAX, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND);
	TRUE(mr);
	if (mr)
		STATUS(ibv_dereg_mr(mr), 0);
}

static void domains(struct ibv_context *context, struct ibv_pd *pd)
{
	struct ibv_td_init_attr td_attr = { .comp_mask = 1 };
	struct ibv_parent_domain_init_attr attr = { .comp_mask = 1 << 20 };
	struct ibv_cq_init_attr_ex cq_attr = { .cqe = 1, .comp_mask = IBV_CQ_INIT_ATTR_MASK_PD };
	struct ibv_td *td;
	struct ibv_pd *parent;
	struct ibv_cq_ex *cq;

	NUL(ibv_alloc_td(context, NULL), EINVAL);
	NUL(ibv_alloc_td(context, &td_attr), EINVAL);
	td_attr.comp_mask = 0;
	td = ibv_alloc_td(context, &td_attr);
	TRUE(td && td->context == context);
	NUL(ibv_alloc_parent_domain(context, NULL), EINVAL);
	NUL(ibv_alloc_parent_domain(context, &attr), EOPNOTSUPP);
	attr.comp_mask = 0;
	NUL(ibv_alloc_parent_domain(context, &attr), EINVAL);
	attr.pd = pd;
	attr.td = td;
	parent = ibv_alloc_parent_domain(context, &attr);
	TRUE(parent && parent->context == context && parent->handle == pd->handle);
	if (!td || !parent)
		return;
	STATUS(ibv_dealloc_td(td), EBUSY);
	STATUS(ibv_dealloc_pd(pd), EBUSY);
	attr.pd = parent;
	NUL(ibv_alloc_parent_domain(context, &attr), EINVAL);
	NUL(ibv_create_cq_ex(context, &cq_attr), EINVAL);
	cq_attr.parent_domain = pd;
	NUL(ibv_create_cq_ex(context, &cq_attr), EINVAL);
	cq_attr.parent_domain = parent;
	cq = ibv_create_cq_ex(context, &cq_attr);
	TRUE(cq);
	if (cq)
		STATUS(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)), 0);
	STATUS(ibv_dealloc_pd(parent), 0);
	STATUS(ibv_dealloc_td(td), 0);
}

/* Another context on the same open device, in the same process. */
static void imports(struct ibv_context *context, struct ibv_pd *pd)
{
	static char memory[64];
	struct ibv_context *other = ibv_import_device(dup(context->cmd_fd));
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE), *other_mr;
	struct ibv_pd *other_pd;

	TRUE(other && other != context && mr);
	if (!other || !mr)
		return;
	NUL(ibv_import_pd(other, ~0u), ENOENT);
	other_pd = ibv_import_pd(other, pd->handle);
	TRUE(other_pd && other_pd->context == other && other_pd->handle == pd->handle);
	if (!other_pd)
		return;
	NUL(ibv_import_mr(other_pd, ~0u), ENOENT);
	other_mr = ibv_import_mr(other_pd, mr->handle);
	TRUE(other_mr && other_mr->lkey == mr->lkey && other_mr->rkey == mr->rkey && other_mr->pd == other_pd);
	if (other_mr)
		ibv_unimport_mr(other_mr);
	ibv_unimport_pd(other_pd);
	STATUS(ibv_dereg_mr(mr), 0);
	STATUS(ibv_close_device(other), 0);
}

static void shared_receive_queues(struct ibv_pd *pd)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 4, .max_sge = 2 } };
	struct ibv_srq_init_attr_ex ex = { .attr = { .max_wr = 4, .max_sge = 1 }, .pd = pd };
	struct ibv_srq_attr attr;
	struct ibv_sge sges[64];
	struct ibv_recv_wr bad_list = { .num_sge = -1 }, *bad = NULL;
	struct ibv_srq *srq;

	memset(sges, 0, sizeof sges);
	init.attr.max_wr = 0;
	NUL(ibv_create_srq(pd, &init), EINVAL);
	init.attr.max_wr = 1 << 30;
	NUL(ibv_create_srq(pd, &init), EINVAL);
	init.attr.max_wr = 4;
	NUL(ibv_create_srq(pd, NULL), EINVAL);
	srq = ibv_create_srq(pd, &init);
	TRUE(srq && init.attr.max_wr >= 4 && init.attr.max_sge >= 2 && srq->pd == pd);
	if (!srq)
		return;
	STATUS(ibv_query_srq(srq, NULL), EINVAL);
	STATUS(ibv_query_srq(srq, &attr), 0);
	TRUE(attr.max_wr >= 4 && attr.srq_limit == 0);
	STATUS(ibv_modify_srq(srq, NULL, IBV_SRQ_LIMIT), EINVAL);
	STATUS(ibv_modify_srq(srq, &attr, 1 << 10), EINVAL);
	attr.srq_limit = 1 << 30;
	STATUS(ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT), EINVAL);
	STATUS(ibv_post_srq_recv(srq, &bad_list, &bad), EINVAL);
	TRUE(bad == &bad_list);
	bad_list.num_sge = 1;
	STATUS(ibv_post_srq_recv(srq, &bad_list, &bad), EINVAL);
	bad_list.num_sge = 64;
	bad_list.sg_list = sges;
	STATUS(ibv_post_srq_recv(srq, &bad_list, &bad), EINVAL);
	STATUS(ibv_destroy_srq(srq), 0);

	ex.comp_mask = 0;
	NUL(ibv_create_srq_ex(pd->context, &ex), EINVAL);
	ex.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD;
	ex.srq_type = IBV_SRQT_TM;
	NUL(ibv_create_srq_ex(pd->context, &ex), EINVAL);
	ex.srq_type = IBV_SRQT_TM + 1;
	NUL(ibv_create_srq_ex(pd->context, &ex), EOPNOTSUPP);
	ex.srq_type = IBV_SRQT_BASIC;
	srq = ibv_create_srq_ex(pd->context, &ex);
	TRUE(srq);
	if (srq)
		STATUS(ibv_destroy_srq(srq), 0);
}

static void posting(struct ibv_qp *qp)
{
	char data[64] = { 0 };
	struct ibv_sge sge = { .addr = (uintptr_t)data, .length = sizeof data };
	struct ibv_sge many[64];
	struct ibv_recv_wr recv = { .wr_id = 1 }, *bad_recv = NULL;
	struct ibv_send_wr send = { .wr_id = 1, .opcode = IBV_WR_SEND }, *bad_send = NULL;

	memset(many, 0, sizeof many);
	STATUS(ibv_post_send(qp, NULL, &bad_send), 0);
	STATUS(ibv_post_recv(qp, NULL, &bad_recv), 0);
	/* RESET */
	STATUS(ibv_post_send(qp, &send, &bad_send), EINVAL);
	TRUE(bad_send == &send);
	STATUS(ibv_post_send(qp, &send, NULL), EINVAL);
	STATUS(ibv_post_recv(qp, &recv, &bad_recv), EINVAL);
	TRUE(bad_recv == &recv);
	send.num_sge = -1;
	STATUS(ibv_post_send(qp, &send, &bad_send), EINVAL);
	send.num_sge = 1;
	STATUS(ibv_post_send(qp, &send, &bad_send), EINVAL);
	send.num_sge = 64;
	send.sg_list = many;
	STATUS(ibv_post_send(qp, &send, &bad_send), EINVAL);
	send.num_sge = 1;
	send.sg_list = &sge;
	send.send_flags = IBV_SEND_INLINE;
	sge.length = 1 << 30;
	STATUS(ibv_post_send(qp, &send, &bad_send), EINVAL);
	sge.length = 8;
	send.opcode = IBV_WR_RDMA_READ;
	STATUS(ibv_post_send(qp, &send, &bad_send), EINVAL);
	send.opcode = 0x7fffffff;
	STATUS(ibv_post_send(qp, &send, &bad_send), EINVAL);
	send.opcode = IBV_WR_TSO;
	STATUS(ibv_post_send(qp, &send, &bad_send), EOPNOTSUPP);
}

static void work_queues(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_wq_init_attr attr = { .pd = pd, .cq = cq, .max_wr = 4, .max_sge = 1 };
	struct ibv_wq *missing[2] = { NULL, NULL };
	struct ibv_rwq_ind_table_init_attr table = { .log_ind_tbl_size = 1, .ind_tbl = missing };
	struct ibv_wq_attr change = { .attr_mask = IBV_WQ_ATTR_STATE, .wq_state = IBV_WQS_ERR };
	struct ibv_wq *wq;

	attr.wq_type = 77;
	NUL(ibv_create_wq(pd->context, &attr), EINVAL);
	attr.wq_type = IBV_WQT_RQ;
	attr.comp_mask = 1 << 30;
	NUL(ibv_create_wq(pd->context, &attr), EINVAL);
	attr.comp_mask = IBV_WQ_INIT_ATTR_FLAGS;
	attr.create_flags = IBV_WQ_FLAGS_CVLAN_STRIPPING;
	NUL(ibv_create_wq(pd->context, &attr), EOPNOTSUPP);
	attr.comp_mask = 0;
	attr.max_wr = ~0u;
	NUL(ibv_create_wq(pd->context, &attr), EINVAL);
	NUL(ibv_create_rwq_ind_table(pd->context, &table), EINVAL);
	table.log_ind_tbl_size = 30;
	NUL(ibv_create_rwq_ind_table(pd->context, &table), EINVAL);
	table.log_ind_tbl_size = 0;
	table.ind_tbl = NULL;
	NUL(ibv_create_rwq_ind_table(pd->context, &table), EINVAL);
	attr.max_wr = 4;
	wq = ibv_create_wq(pd->context, &attr);
	if (!wq) {
		/* No right to frames here. */
		TRUE(errno == EPERM);
		return;
	}
	TRUE(attr.max_wr >= 4 && attr.max_sge >= 1 && wq->state == IBV_WQS_RESET && wq->pd == pd && wq->cq == cq);
	STATUS(ibv_modify_wq(wq, &change), EINVAL);
	change.wq_state = 9;
	STATUS(ibv_modify_wq(wq, &change), EINVAL);
	change.attr_mask = IBV_WQ_ATTR_FLAGS;
	STATUS(ibv_modify_wq(wq, &change), EOPNOTSUPP);
	change.attr_mask = IBV_WQ_ATTR_STATE | IBV_WQ_ATTR_CURR_STATE;
	change.wq_state = IBV_WQS_RDY;
	change.curr_wq_state = IBV_WQS_RDY;
	STATUS(ibv_modify_wq(wq, &change), EINVAL);
	change.curr_wq_state = IBV_WQS_RESET;
	STATUS(ibv_modify_wq(wq, &change), 0);
	TRUE(wq->state == IBV_WQS_RDY);
	STATUS(ibv_destroy_wq(wq), 0);
}

static void flows(struct ibv_qp *qp)
{
	struct ibv_flow_attr attr = { 0 };

	NUL(ibv_create_flow(qp, NULL), EINVAL);
	NUL(ibv_create_flow(qp, &attr), EINVAL);
	attr.port = 1;
	attr.flags = ~0u;
	NUL(ibv_create_flow(qp, &attr), EOPNOTSUPP);
	attr.flags = 0;
	attr.type = 77;
	NUL(ibv_create_flow(qp, &attr), EINVAL);
	/* Only queue pairs that take frames have flows. */
	attr.type = IBV_FLOW_ATTR_NORMAL;
	NUL(ibv_create_flow(qp, &attr), EINVAL);
}

static void queue_pairs(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .qp_context = &failures,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 64 },
	};
	struct ibv_qp_init_attr_ex ex = { .pd = pd };
	struct ibv_qp_init_attr asked = init;
	struct ibv_qp_attr attr;
	struct ibv_ece ece = { .vendor_id = 5 };
	struct ibv_qp *qp;

	NUL(ibv_create_qp(pd, NULL), EINVAL);
	init.send_cq = NULL;
	NUL(ibv_create_qp(pd, &init), EINVAL);
	init = asked;
	init.qp_type = 77;
	NUL(ibv_create_qp(pd, &init), EINVAL);
	init.qp_type = IBV_QPT_DRIVER;
	NUL(ibv_create_qp(pd, &init), EOPNOTSUPP);
	init = asked;
	init.cap.max_send_wr = ~0u;
	NUL(ibv_create_qp(pd, &init), EINVAL);
	init = asked;
	init.cap.max_recv_sge = 1 << 20;
	NUL(ibv_create_qp(pd, &init), EINVAL);
	init = asked;
	init.cap.max_inline_data = 1 << 30;
	NUL(ibv_create_qp(pd, &init), EINVAL);
	init = asked;
	qp = ibv_create_qp(pd, &init);
	TRUE(qp && init.cap.max_send_wr >= 4 && init.cap.max_inline_data >= 64);
	if (!qp)
		return;
	TRUE(qp->state == IBV_QPS_RESET && qp->pd == pd && qp->send_cq == cq && qp->qp_context == &failures && !qp->srq);
	NUL(ibv_qp_to_qp_ex(qp), EOPNOTSUPP);
	STATUS(ibv_destroy_cq(cq), EBUSY);
	STATUS(ibv_modify_qp(qp, NULL, IBV_QP_STATE), EINVAL);
	memset(&attr, 0xff, sizeof attr);
	STATUS(ibv_modify_qp(qp, &attr, IBV_QP_STATE), EINVAL);
	STATUS(ibv_modify_qp(qp, &attr, 1 << 30), EINVAL);
	STATUS(ibv_modify_qp(qp, &attr, -1), EINVAL);
	STATUS(ibv_modify_qp(qp, &attr, IBV_QP_ALT_PATH), EOPNOTSUPP);
	attr.qp_state = IBV_QPS_RTS;
	STATUS(ibv_modify_qp(qp, &attr, IBV_QP_STATE), EINVAL);
	STATUS(ibv_modify_qp(qp, &attr, IBV_QP_PATH_MTU), EINVAL);
	STATUS(ibv_query_qp(qp, NULL, 0, NULL), EINVAL);
	STATUS(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init), 0);
	TRUE(attr.qp_state == IBV_QPS_RESET && init.qp_type == IBV_QPT_RC && init.send_cq == cq);
	STATUS(ibv_query_qp_data_in_order(qp, IBV_WR_SEND, 0), 0);
	STATUS(ibv_set_ece(qp, NULL), EINVAL);
	STATUS(ibv_set_ece(qp, &ece), EOPNOTSUPP);
	STATUS(ibv_query_ece(qp, &ece), 0);
	STATUS(ibv_set_ece(qp, &ece), 0);
	posting(qp);
	missing_verbs(pd->context, qp);
	counters(pd->context);
	tag_matching(pd->context, pd);
	xrc(pd->context, pd, cq);
	flows(qp);
	work_queues(pd, cq);
	attr.qp_state = IBV_QPS_ERR;
	STATUS(ibv_modify_qp(qp, &attr, IBV_QP_STATE), EINVAL);
	TRUE(qp->state == IBV_QPS_RESET);
	attr.qp_state = IBV_QPS_INIT;
	attr.port_num = 1;
	attr.pkey_index = 0;
	attr.qp_access_flags = 0;
	STATUS(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), 0);
	TRUE(qp->state == IBV_QPS_INIT);
	attr.qp_state = IBV_QPS_ERR;
	STATUS(ibv_modify_qp(qp, &attr, IBV_QP_STATE), 0);
	TRUE(qp->state == IBV_QPS_ERR);
	STATUS(ibv_destroy_qp(qp), 0);

	NUL(ibv_create_qp_ex(pd->context, &(struct ibv_qp_init_attr_ex){ .comp_mask = 0 }), EINVAL);
	memcpy(&ex, &asked, sizeof asked);
	ex.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_RX_HASH;
	NUL(ibv_create_qp_ex(pd->context, &ex), EINVAL);
	ex.comp_mask |= IBV_QP_INIT_ATTR_IND_TABLE;
	NUL(ibv_create_qp_ex(pd->context, &ex), EOPNOTSUPP);
	ex.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	ex.pd = pd;
	ex.send_ops_flags = IBV_QP_EX_WITH_TSO;
	NUL(ibv_create_qp_ex(pd->context, &ex), EOPNOTSUPP);
}

static void extended_queue_pairs(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_qp_init_attr_ex init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .pd = pd,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 64 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_READ,
	};
	static char data[4096];
	struct ibv_data_buf buffers[2] = { { data, 32 }, { data, 33 } };
	struct ibv_sge sges[3];
	struct ibv_mw_bind_info info = { 0 };
	struct ibv_qp *qp = ibv_create_qp_ex(pd->context, &init);
	struct ibv_qp_ex *ex;

	TRUE(qp);
	if (!qp)
		return;
	memset(sges, 0, sizeof sges);
	ex = ibv_qp_to_qp_ex(qp);
	TRUE((void *)ex == (void *)qp);
	if (!ex)
		return;
	/* Outside a batch: refused, harmless. */
	STATUS(ibv_wr_complete(ex), EINVAL);
	ibv_wr_abort(ex);
	ibv_wr_send(ex);
	ibv_wr_set_sge(ex, 1, 0, 1);

	ibv_wr_start(ex);
	STATUS(ibv_wr_complete(ex), 0);
	/* RESET */
	ibv_wr_start(ex);
	ibv_wr_send(ex);
	STATUS(ibv_wr_complete(ex), EINVAL);
	/* A setter without a request. */
	ibv_wr_start(ex);
	ibv_wr_set_sge(ex, 1, 0, 1);
	STATUS(ibv_wr_complete(ex), EINVAL);
	/* Too much. */
	ibv_wr_start(ex);
	ibv_wr_send(ex);
	ibv_wr_set_inline_data(ex, data, sizeof data);
	STATUS(ibv_wr_complete(ex), EINVAL);
	ibv_wr_start(ex);
	ibv_wr_send(ex);
	ibv_wr_set_inline_data_list(ex, 2, buffers);
	STATUS(ibv_wr_complete(ex), EINVAL);
	ibv_wr_start(ex);
	ibv_wr_send(ex);
	ibv_wr_set_inline_data_list(ex, 1, NULL);
	STATUS(ibv_wr_complete(ex), EINVAL);
	ibv_wr_start(ex);
	ibv_wr_rdma_read(ex, 1, 2);
	ibv_wr_set_sge_list(ex, 3, sges);
	STATUS(ibv_wr_complete(ex), EINVAL);
	ibv_wr_start(ex);
	ibv_wr_send(ex);
	ibv_wr_set_ud_addr(ex, NULL, 1, 1);
	STATUS(ibv_wr_complete(ex), EINVAL);
	/* No window. */
	ibv_wr_start(ex);
	ibv_wr_bind_mw(ex, NULL, 1, &info);
	STATUS(ibv_wr_complete(ex), EINVAL);
	/* Not granted. */
	ibv_wr_start(ex);
	ibv_wr_send_tso(ex, NULL, 0, 0);
	STATUS(ibv_wr_complete(ex), EOPNOTSUPP);
	ibv_wr_start(ex);
	ibv_wr_atomic_write(ex, 1, 0, NULL);
	STATUS(ibv_wr_complete(ex), EINVAL);
	/* Not XRC. */
	ibv_wr_start(ex);
	ibv_wr_send(ex);
	ibv_wr_set_xrc_srqn(ex, 1);
	STATUS(ibv_wr_complete(ex), EINVAL);
	/* The rest of the builders, thrown away. */
	ibv_wr_start(ex);
	ibv_wr_atomic_cmp_swp(ex, 1, 2, 3, 4);
	ibv_wr_atomic_fetch_add(ex, 1, 2, 3);
	ibv_wr_local_inv(ex, 1);
	ibv_wr_rdma_write(ex, 1, 2);
	ibv_wr_rdma_write_imm(ex, 1, 2, 3);
	ibv_wr_send_imm(ex, 1);
	ibv_wr_send_inv(ex, 1);
	ibv_wr_abort(ex);
	ibv_wr_start(ex);
	STATUS(ibv_wr_complete(ex), 0);
	STATUS(ibv_destroy_qp(qp), 0);
}

static void address_handles(struct ibv_pd *pd)
{
	struct ibv_ah_attr attr = { .port_num = 1 };
	struct ibv_wc wc = { .wc_flags = IBV_WC_GRH };
	struct ibv_grh grh;
	struct ibv_ah *ah;

	memset(&grh, 0, sizeof grh);
	NUL(ibv_create_ah(pd, NULL), EINVAL);
	/* RoCE needs a GRH. */
	NUL(ibv_create_ah(pd, &attr), EINVAL);
	attr.is_global = 1;
	STATUS(ibv_query_gid(pd->context, 1, 0, &attr.grh.dgid), 0);
	attr.grh.sgid_index = 255;
	NUL(ibv_create_ah(pd, &attr), EINVAL);
	attr.grh.sgid_index = 0;
	attr.port_num = 2;
	NUL(ibv_create_ah(pd, &attr), EINVAL);
	attr.port_num = 1;
	ah = ibv_create_ah(pd, &attr);
	TRUE(ah && ah->pd == pd && ah->context == pd->context);
	STATUS(ibv_dealloc_pd(pd), EBUSY);
	if (ah)
		STATUS(ibv_destroy_ah(ah), 0);
	MINUS(ibv_init_ah_from_wc(pd->context, 1, &wc, NULL, &attr), EINVAL);
	MINUS(ibv_init_ah_from_wc(pd->context, 1, &wc, &grh, &attr), EINVAL);
	MINUS(ibv_init_ah_from_wc(pd->context, 1, NULL, &grh, &attr), EINVAL);
	NUL(ibv_create_ah_from_wc(pd, &wc, &grh, 1), EINVAL);
	wc.wc_flags = 0;
	STATUS(ibv_init_ah_from_wc(pd->context, 1, &wc, NULL, &attr), 0);
	MINUS(ibv_resolve_eth_l2_from_gid(pd->context, &attr, NULL, NULL), EOPNOTSUPP);
}

static void private_symbols(void)
{
	static const char *const names[] = {
		"ibv_cmd_alloc_pd", "ibv_cmd_create_cq_ex", "ibv_cmd_query_device_any", "ibv_cmd_reg_dmabuf_mr", "execute_ioctl",
	};
	static const char *const nodes[] = {
		"IBVERBS_PRIVATE_34", "IBVERBS_PRIVATE_57", "IBVERBS_PRIVATE_59", "IBVERBS_PRIVATE_64", "IBVERBS_PRIVATE_65",
	};

	for (size_t node = 0; node < sizeof nodes / sizeof *nodes; node++) {
		char name[64];
		void (*register_driver)(void *);
		unsigned char *data = dlvsym(RTLD_DEFAULT, "verbs_allow_disassociate_destroy", nodes[node]);

		TRUE(data && *data == 0);
		snprintf(name, sizeof name, "verbs_register_driver_%s", strrchr(nodes[node], '_') + 1);
		register_driver = (void (*)(void *))dlvsym(RTLD_DEFAULT, name, nodes[node]);
		TRUE(register_driver);
		if (register_driver)
			register_driver(NULL);
		for (size_t at = 0; at < sizeof names / sizeof *names; at++) {
			int (*function)(long, long, long, long, long, long) =
				(int (*)(long, long, long, long, long, long))dlvsym(RTLD_DEFAULT, names[at], nodes[node]);

			check(function != NULL, names[at], (long)node, errno);
			if (function)
				STATUS(function(0, 0, 0, 0, 0, 0), EOPNOTSUPP);
		}
	}
}

int main(void)
{
	struct ibv_device own = { .name = "own" };
	struct ibv_device **list, **again;
	struct ibv_context *context;
	struct ibv_comp_channel *channel;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_async_event event;
	int count = -1;

	without_objects();
	nothing_at_all();
	private_symbols();

	list = ibv_get_device_list(&count);
	again = ibv_get_device_list(NULL);
	if (!list || count < 1 || !list[0] || !again) {
		printf("no device: %d, errno %d\n", count, errno);
		return 1;
	}
	TRUE(list[count] == NULL);
	TRUE(list[0] == again[0]);
	ibv_free_device_list(again);
	TRUE(ibv_get_device_name(&own) == own.name);
	TRUE(strlen(ibv_get_device_name(list[0])) > 0 && ibv_get_device_guid(list[0]) && ibv_get_device_index(list[0]) >= 0);
	context = ibv_open_device(list[0]);
	if (!context) {
		printf("cannot open %s: errno %d\n", ibv_get_device_name(list[0]), errno);
		return 1;
	}
	ibv_free_device_list(list);
	TRUE(strlen(ibv_get_device_name(context->device)) > 0);

	table_shape(context);
	questions(context);
	younger_than_the_headers(context);
	MINUS(ibv_get_async_event(context, NULL), EINVAL);
	fcntl(context->async_fd, F_SETFL, fcntl(context->async_fd, F_GETFL) | O_NONBLOCK);
	MINUS(ibv_get_async_event(context, &event), EAGAIN);

	pd = ibv_alloc_pd(context);
	channel = ibv_create_comp_channel(context);
	TRUE(pd && pd->context == context && channel && channel->context == context && channel->refcnt == 0);
	if (!pd || !channel)
		return 1;
	completion_queues(context, channel);
	STATUS(ibv_destroy_comp_channel(channel), 0);
	cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	TRUE(cq);
	if (cq) {
		regions(pd);
		device_memory(pd);
		advice(pd);
		domains(context, pd);
		imports(context, pd);
		shared_receive_queues(pd);
		queue_pairs(pd, cq);
		extended_queue_pairs(pd, cq);
		address_handles(pd);
		STATUS(ibv_destroy_cq(cq), 0);
	}
	STATUS(ibv_dealloc_pd(pd), 0);
	STATUS(ibv_close_device(context), 0);
	printf("%d wrong answers\n", failures);
	return failures != 0;
}
