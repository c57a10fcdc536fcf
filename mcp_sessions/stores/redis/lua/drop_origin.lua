-- needs: session log
-- ARGV: stream, origin, new log epoch, fencing epoch (empty: whatever)
local ends = redis.call('HGET', base, 'ends')
if not ends then
    return false
end
local carried = redis.call('HGET', base .. ':c', ARGV[2])
local fence = carried and tonumber(string.match(carried, '^%d+'))
if fence and ARGV[4] ~= '' and fence > tonumber(ARGV[4]) then
    return false
end
local log = open_log(ARGV[1], ARGV[3], seconds(ends))
if log then
    drop_origin(log, ARGV[2])
end
if ARGV[1] == 'get' then
    redis.call('HDEL', base .. ':c', ARGV[2])
end
return false
