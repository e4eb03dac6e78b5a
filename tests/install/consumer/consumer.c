/* A program in C that uses an installed Headwater: the version, a page pool, an error with its message. */
#include <headwater/headwater_c.h>
#include <stdio.h>
#include <string.h>

int main(void) {
  hw_error error;
  hw_page_pool* pool = NULL;
  hw_sequence sequence = -1;
  if (hw_page_pool_create(8, 16, 0, &pool, &error) != HW_OK) return 1;
  if (hw_page_pool_create_sequence(pool, &sequence, &error) != HW_OK) return 2;
  if (hw_page_pool_release(pool, 99, &error) != HW_ERROR_INVALID_ARGUMENT) return 3;
  if (strstr(error.message, "sequence = 99") == NULL) return 4;
  hw_page_pool_destroy(pool);
  printf("headwater %s from C\n", hw_version());
  return 0;
}
