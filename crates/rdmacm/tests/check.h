/* What the C programs of this folder judge themselves with. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                           \
	do {                                                                                                       \
		if (!(condition)) {                                                                                \
			printf("line %d: %s is false (%s)\n", __LINE__, #condition, strerror(errno));              \
			exit(1);                                                                                   \
		}                                                                                                  \
	} while (0)
