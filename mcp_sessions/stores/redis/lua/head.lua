-- needs: session log
-- ARGV: stream, new log epoch, whether to make it if it is not there
local ends = redis.call('HGET', base, 'ends')
if not ends then
    return false
end
local open = ARGV[3] == '1' and open_or_make_log or open_log
local log = open(ARGV[1], ARGV[2], seconds(ends))
return log and { log.epoch, whole(log.head) } or false
