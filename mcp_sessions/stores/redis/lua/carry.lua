-- needs: session log
-- ARGV: origin, fencing epoch, log epoch and number of the last event that is there, new log epoch
local ends = redis.call('HGET', base, 'ends')
if not ends then
    return 0
end
local carried = redis.call('HGET', base .. ':c', ARGV[1])
local fence = carried and string.match(carried, '^%d+')
if fence == ARGV[2] then
    return 1
end
if fence and tonumber(fence) > tonumber(ARGV[2]) then
    return 0
end
local log = open_log('get', ARGV[5], seconds(ends))
if log then
    drop_origin(log, ARGV[1])
end
redis.call('HSET', base .. ':c', ARGV[1], table.concat({ ARGV[2], ARGV[3], ARGV[4] }, ' '))
share_lifetime(base .. ':c')
return 1
