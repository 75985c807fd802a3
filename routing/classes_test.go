package routing

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestClasses(t *testing.T) {
	for _, c := range []struct {
		names []string
		want  Classes
		ok    bool
	}{
		{nil, Classes{}, true},
		{[]string{"priority"}, Classes{1, 1}, true},
		{[]string{"default", "priority"}, Classes{1, 2}, true},
		{[]string{"flex", "batch"}, Classes{3, 4}, true},
		{[]string{"priority", "default", "flex", "batch"}, Classes{}, true},
		{[]string{"priority", "flex"}, Classes{}, false},
		{[]string{"gold"}, Classes{}, false},
	} {
		got, err := ParseClasses(c.names)
		assert.Equal(t, c.want, got, "%v", c.names)
		assert.Equal(t, c.ok, err == nil, "%v: %v", c.names, err)
	}
	seen := map[uint8]bool{}
	for high := ClassPriority; high <= ClassBatch; high++ {
		for low := high; low <= ClassBatch; low++ {
			c := Classes{high, low}
			if high == ClassPriority && low == ClassBatch {
				c = Classes{}
			}
			code := c.Code()
			assert.Equal(t, c, ClassesOf(code))
			assert.False(t, seen[code], "%v", c)
			seen[code] = true
			for class := ClassPriority; class <= ClassBatch; class++ {
				assert.Equal(t, class >= high && class <= low, c.Has(class), "%v, class %d", c, class)
			}
			again, err := ParseClasses(c.Names())
			assert.NoError(t, err)
			assert.Equal(t, c, again)
		}
	}
	assert.Equal(t, Classes{}, ClassesOf(99))
}
